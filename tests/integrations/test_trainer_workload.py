"""Workload.from_trainer: a trial's step is the trainer's own, and the trainer is left as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from autotune_amp import AmpConfig, Workload
from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.setting import Setting
from autotune_amp.fingerprint import workload_parts
from autotune_amp.processes.packing import pack, unpack
from autotune_amp.trial.context import make_model
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.training import Training, make_training

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, Trainer


BATCH, VOCABULARY = 4, 64


def sentences(num_rows: int = 48) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(4, 17, (num_rows,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, VOCABULARY, (n,), generator=generator).tolist()} for n in lengths]


def padded(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


def gpt2() -> GPT2LMHeadModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    shape |= {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**shape))


def token_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def trainer(folder: Path, kind: type[Trainer] | None = None, *, loss: Any = None, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    plain: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    plain |= {"weight_decay": 0.1, "per_device_train_batch_size": BATCH, "max_steps": 2}
    args = TrainingArguments(str(folder), **plain, **options)
    return (kind or Trainer)(gpt2(), args, train_dataset=sentences(), data_collator=padded, compute_loss_func=loss)


@contextmanager
def another_process() -> Iterator[None]:
    """Accelerate's state is the process's; what runs here finds none, as in a trial, and leaves none."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    shared = [kind._shared_state for kind in (PartialState, AcceleratorState, GradientState)]
    before = [dict(state) for state in shared]
    try:
        yield
    finally:
        for state, contents in zip(shared, before, strict=True):
            state.clear()
            state.update(contents)


def trial(workload: Workload, **candidate: Any) -> Training:
    """What a trial makes of it, on the copy that travels there."""
    there = unpack(pack(workload))
    assert isinstance(there, Workload)
    spec = Trial(candidate=Setting(**{"precision": "fp32", "batch_size": BATCH, **candidate}), device="cpu")
    training = make_training(there, make_model(there), spec)
    assert isinstance(training, Training)
    return training


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("own_loss", [None, token_loss])
def test_a_trials_gradient_is_that_of_the_trainers_own_training_step(tmp_path: Path, own_loss: Any) -> None:
    live = trainer(tmp_path, loss=own_loss)
    batch = padded(sentences()[:BATCH])
    with another_process():
        training = trial(Workload.from_trainer(live))
        loss = training.forward_backward(copy.deepcopy(batch))
    (inputs,), num_items = live.get_batch_samples(iter([batch]), 1, live.args.device)
    live.current_gradient_accumulation_steps = 1
    expected = live.training_step(live.model, inputs, num_items)
    assert torch.equal(loss, expected)
    assert same(gradients(training.model), gradients(live.model))


def test_a_trial_takes_the_optimizer_loader_and_preparation_of_the_trainer_and_leaves_it_alone(tmp_path: Path) -> None:
    live = trainer(tmp_path, activation_checkpointing=True, optim="adamw_torch", adam_beta2=0.95, learning_rate=0.01)
    before = {name: value.clone() for name, value in live.model.state_dict().items()}
    attributes = vars(live).copy(), vars(live.args).copy()
    with another_process():
        training = trial(Workload.from_trainer(live), batch_size=6, accumulation_steps=2)
        training.start_loading()
        batch = training.next_batch()
        training.forward_backward(batch)
        training.update()
        training.close()
    assert same(before, live.model.state_dict())
    assert attributes == (vars(live), vars(live.args))
    assert not live.model.is_activation_checkpointing
    decayed, others = training.optimizer.param_groups
    names = {name for name, p in training.model.named_parameters() if any(p is one for one in decayed["params"])}
    assert names <= {*live.get_decay_parameter_names(live.model)}
    assert len(decayed["params"]) + len(others["params"]) == len(list(training.model.parameters()))
    assert isinstance(training.optimizer, torch.optim.AdamW)
    assert [group["weight_decay"] for group in (decayed, others)] == [0.1, 0]
    assert [group["initial_lr"] for group in (decayed, others)] == [0.01, 0.01]
    assert all(group["betas"][1] == 0.95 for group in (decayed, others))
    assert batch["input_ids"].shape[0] == 6
    assert training.model.is_activation_checkpointing


def test_after_a_training_that_took_the_learning_rate_to_nothing_a_trials_schedule_begins_again(tmp_path: Path) -> None:
    live = trainer(tmp_path, learning_rate=0.01)
    live.train()
    rates = [group["lr"] for group in live.optimizer.param_groups]
    assert rates == [0.0, 0.0]
    with another_process():
        training = trial(Workload.from_trainer(live))
        before = {name: value.clone() for name, value in training.model.state_dict().items()}
        training.forward_backward(padded(sentences()[:BATCH]))
        training.update()
    assert [group["lr"] for group in training.optimizer.param_groups] == pytest.approx([0.01, 0.01], rel=0.001)
    assert not same(before, training.model.state_dict())
    assert [group["lr"] for group in live.optimizer.param_groups] == rates


def test_it_runs_under_the_trials_autocast_and_says_what_runs_today(tmp_path: Path) -> None:
    from trainer_samples import Notes, arguments, rows
    from transformers import Trainer

    live: Any = Trainer(
        Notes(),
        arguments(AmpConfig(precision="bf16", batch_size=BATCH, accumulation_steps=3), tmp_path),
        train_dataset=rows(BATCH),
    )
    with another_process():
        workload = Workload.from_trainer(live)
        training = trial(workload)
        training.forward_backward(torch.utils.data.default_collate(rows(BATCH)))
    assert training.model.runs == {0: {(None, torch.float32, BATCH)}}  # not the trainer's own bf16
    assert (workload.accumulation_steps, workload.precision, workload.weighs_passes) == (3, "bf16", False)
    assert workload.data.batch_size == BATCH
    # On a CPU Accelerate has no autocast for fp16.
    assert Workload.from_trainer(trainer(tmp_path, fp16=True)).precision is None


@pytest.mark.parametrize("weighs", [True, False])
def test_it_weighs_passes_where_the_trainer_does_not_divide_by_their_number(tmp_path: Path, weighs: bool) -> None:
    from transformers import Trainer

    class Own(Trainer):
        loss_is_scaled_for_ga = None if weighs else False  # by default the model says it

    live = trainer(tmp_path, Own)
    losses = []
    for num_passes in (1, 2):
        live.current_gradient_accumulation_steps = num_passes
        batch = live.data_collator(live.train_dataset[:BATCH])
        (inputs,), num_items = live.get_batch_samples(iter([batch]), 1, live.args.device)
        losses.append(float(live.training_step(live.model, inputs, num_items)))
    assert losses[0] == pytest.approx(losses[1] if weighs else 2 * losses[1])
    assert Workload.from_trainer(live).weighs_passes is weighs


def test_two_trainers_made_alike_are_the_same_workload(tmp_path: Path) -> None:
    (one, unknown, _), (other, _, _) = (
        workload_parts(Workload.from_trainer(trainer(tmp_path / name))) for name in ("one", "other")
    )
    assert unknown == ()
    assert one == other
    changed, _, _ = workload_parts(Workload.from_trainer(trainer(tmp_path, label_smoothing_factor=0.1)))
    assert one != changed


def test_what_cannot_be_searched_is_refused(tmp_path: Path) -> None:
    from trainer_samples import arguments
    from transformers import Trainer

    from autotune_amp.integrations.transformers import AutotuneTrainer

    class Own(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss: Any = self.compute_loss(model, inputs)
            loss.backward()
            return torch.zeros(())

    with another_process(), pytest.raises(WorkloadError, match=r"Own.training_step did not call self.accelerator"):
        trial(Workload.from_trainer(trainer(tmp_path, Own))).forward_backward(padded(sentences()[:BATCH]))
    live = trainer(tmp_path)
    live.train_dataset = None
    with pytest.raises(WorkloadError, match="no train_dataset"):
        Workload.from_trainer(live)
    config = AmpConfig(precision="fp32", batch_size=BATCH)
    with pytest.raises(WorkloadError, match="is an AutotuneTrainer"):
        Workload.from_trainer(AutotuneTrainer(gpt2(), arguments(config, tmp_path), amp_config=config))


def test_what_runs_today_must_be_possible() -> None:
    with pytest.raises(WorkloadError, match=r"accumulation_steps=0"):
        Workload(gpt2, lambda model, batch: model(**batch).loss, sentences(), accumulation_steps=0)
    with pytest.raises(WorkloadError, match=r"accumulation_steps=2.*1 for a loop"):
        Workload(build=dict, train_step=lambda state, batch, amp: None, data=sentences(), accumulation_steps=2)
    with pytest.raises(WorkloadError, match=r"precision='int8'"):
        Workload(gpt2, lambda model, batch: model(**batch).loss, sentences(), precision="int8")  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match=r"trainer_ranks=0"):
        Workload(gpt2, lambda model, batch: model(**batch).loss, sentences(), trainer_ranks=0)


class Rounding(torch.optim.SGD):
    """As the 8-bit ones of bitsandbytes: one argument is an attribute."""

    def __init__(self, params: Any, lr: float = 0.1, *, bits: int = 32) -> None:
        super().__init__(params, lr=lr)
        self.bits = bits


class Renaming(torch.optim.Optimizer):
    """Its defaults have other names than its arguments, as far as these have names."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "num_bits": options.get("bits", 32)})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Leave the parameters."""


class ScheduleFree(torch.optim.Optimizer):
    """As those of schedule-free learning, it counts its steps among the options of its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "num_steps": 0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["num_steps"] += 1


def test_after_a_training_the_trainers_own_optimizer_is_known_though_it_keeps_state_in_its_options(
    tmp_path: Path,
) -> None:
    live = trainer(tmp_path)
    live.optimizer_cls_and_kwargs = ScheduleFree, {"lr": 0.2}
    live.train()
    with another_process():
        made: Any = trial(Workload.from_trainer(live)).optimizer
    assert isinstance(made, ScheduleFree)
    assert {group["num_steps"] for group in made.param_groups} == {0}


@pytest.mark.parametrize("returns", [True, False])
def test_a_trial_makes_the_optimizer_as_the_trainers_own_method_does(tmp_path: Path, returns: bool) -> None:
    from transformers import Trainer

    class Own(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            created: Any = self
            if created.optimizer is None:
                created.optimizer = Rounding(self.model.parameters(), bits=8)
            return created.optimizer if returns else None

    live = trainer(tmp_path, Own)
    for is_trained in (False, True):
        with another_process():
            made: Any = trial(Workload.from_trainer(live)).optimizer
        assert made.bits == 8
        if not is_trained:
            live.train()


def test_a_trial_copies_the_optimizer_of_the_user_also_of_the_trainers_class_and_defaults(tmp_path: Path) -> None:
    live = trainer(tmp_path, optim="adamw_torch")
    defaults = {**live.create_optimizer().defaults}
    del defaults["decoupled_weight_decay"]  # AdamW's own
    for groups in (
        [{"params": [*live.model.lm_head.parameters()]}],
        [{**group, "lr": 0.5} for group in live.optimizer.param_groups],
    ):
        live.optimizer = torch.optim.AdamW(groups, **defaults)
        with another_process():
            made: Any = trial(Workload.from_trainer(live)).optimizer
        described = [(len(group["params"]), group["initial_lr"]) for group in made.param_groups]
        assert described == [(len(group["params"]), group["lr"]) for group in live.optimizer.param_groups]
    live = trainer(tmp_path)
    live.optimizer = torch.optim.SGD(live.model.parameters(), lr=0.25)
    for is_trained in (False, True):
        with another_process():
            made = trial(Workload.from_trainer(live)).optimizer
        assert isinstance(made, torch.optim.SGD)
        assert made.defaults["lr"] == 0.25
        if not is_trained:
            live.train()


def test_the_users_optimizer_is_known_by_options_that_are_no_named_arguments(tmp_path: Path) -> None:
    live = trainer(tmp_path)
    live.optimizer_cls_and_kwargs = Renaming, {"lr": 0.2}
    groups = [
        {name: group[name] for name in ("params", "weight_decay")} for group in live.create_optimizer().param_groups
    ]
    live.optimizer = Renaming(groups, lr=0.2, bits=8)
    for is_trained in (False, True):
        with another_process():
            made: Any = trial(Workload.from_trainer(live)).optimizer
        assert {group["num_bits"] for group in made.param_groups} == {8}
        if not is_trained:
            live.train()


def test_the_devices_that_the_trainer_would_train_on_are_known(tmp_path: Path) -> None:
    live = trainer(tmp_path)
    assert Workload.from_trainer(live).trainer_ranks == 1
    live.args._n_gpu = 2
    assert Workload.from_trainer(live).trainer_ranks == 2
