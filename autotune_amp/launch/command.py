"""A command and what is known of it: what it does today, what of that can be set, and the files that its runs made."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune_amp.core.job import Deadlines
from autotune_amp.core.launch_line import LaunchLine
from autotune_amp.core.setting import Setting
from autotune_amp.distributed import free_port
from autotune_amp.isolation.local import TRIAL_ENVIRONMENT
from autotune_amp.isolation.process import Watcher
from autotune_amp.launch.made import remembered
from autotune_amp.launch.ranks import Heard
from autotune_amp.launch.running import Ran, run


class Command:
    """A launch line that is run many times.

    Once it was observed, `today` is what it does, `maker` what makes its training loader, and `unsettable` as in
    `Description`; `sample_dim` is the dimension of what enters its model along which samples are counted where there
    is no DataLoader, `num_sharing` how many ranks divide the batch size among them. `made` are the files that its runs
    left outside of their own folders; `opened` is called with the files of code and settings that a run read.
    """

    def __init__(self, line: LaunchLine) -> None:
        self.line = line
        self.today: Setting | None = None
        self.maker: str | None = None
        self.unsettable: dict[str, str] = {}
        self.sample_dim = 0
        self.num_sharing = 1
        self.made: tuple[str, ...] = ()
        self.opened: Callable[[Sequence[str]], object] = lambda _: None
        self._memory: Path | None = None

    def run(
        self,
        setting: Setting,
        deadlines: Deadlines,
        is_enough: Callable[[Heard], bool],
        watcher: Watcher,
        *,
        seed: int = 0,
        environment: Mapping[str, str] | None = None,
        memory_limit_bytes: int | None = None,
        kept: Path | None = None,
        **agent: Any,
    ) -> Ran:
        """Run it once, filled with `setting`; what has no placeholder and is not today's is set from outside."""
        outside = {} if self.today is None else self.line.outside(setting, self.today)
        if "batch_size" in outside:
            outside["maker"] = self.maker
        with tempfile.TemporaryDirectory(prefix="autotune_amp-") as folder:
            of_trial = {"seed": seed, "trial_dir": folder, "port": free_port()}
            arguments, files = self.line.of_setting(setting, folder, **of_trial)
            for path, text in files.items():
                Path(path).write_text(text)
            ran = run(
                arguments,
                environment={**_compilers_cache(), **os.environ, **TRIAL_ENVIRONMENT, **(environment or {})},
                agent={"seed": seed, "outside": outside, "sample_dim": self.sample_dim, **agent},
                folders=[Path(folder), *([] if kept is None else [kept.parent])],
                made=self.made,
                deadlines=deadlines,
                is_enough=is_enough,
                watcher=watcher,
                memory_limit_bytes=memory_limit_bytes,
                kept=kept,
                memory=self._memory,
            )
        self.made = ran.made
        self.opened([path for path in ran.opened if not {path, *map(str, Path(path).parents)}.intersection(ran.made)])
        return ran

    def keep_in(self, folder: Path) -> None:
        """Know again what earlier runs made, by a file in the study's folder."""
        self._memory = folder / "made.json"
        self.made = remembered(self._memory)


def _compilers_cache() -> dict[str, str]:
    """Return where torch keeps what it compiled unless told otherwise, by the variable that names it: beside TMPDIR,
    which is gone with each run."""
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):  # of a user without a name, as in many containers; torch calls it so too
        user = f"uid_{os.getuid()}"
    return {"TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir(), f"torchinductor_{user}"))}
