"""Pieces of HTML: what is foreign stays text, and a notebook's fragment needs nothing but itself."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_amp.core import markup
from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory, Hardware
from autotune_amp.core.text import one_line, printable


class Read(HTMLParser):
    """The tags and the text of a document, as a browser takes them apart; what a style holds is no text."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data if self.tags[-1] != "style" else ""


HOSTILE = st.text() | st.sampled_from(
    ["<script>alert(1)</script>", '"><img src=x onerror=y>', "a & b", "\x1b[2J", "\ud800"]
)


@given(HOSTILE)
def test_words_of_others_make_no_markup(words: str) -> None:
    shown = {
        markup.paragraph(words): ["p"],
        markup.definition_list([(words, words)]): ["dl", "dt", "dd"],
        markup.tiles([(words, words, words)]): ["div", "div", "span", "b", "span"],
        markup.collapsible(words, ""): ["details", "summary"],
        markup.table([words], [[words]]): ["div", "table", "thead", "tr", "th", "tbody", "tr", "td"],
    }
    for document, tags in shown.items():
        read = Read(document)
        assert read.tags == tags
        assert printable(words).replace("\r", "") in read.text.replace("\r", "")


def test_columns_of_numbers_are_marked() -> None:
    shown = markup.table(["name", "one", "two", "why"], [["a", "1", "2", "so"]], num_numeric=2)
    assert shown.count('<td class="number">') == 2


@pytest.mark.parametrize("name", ["NVIDIA <T4>", "a\nb"])
def test_an_object_is_one_box_with_its_own_style(name: str) -> None:
    hardware = Hardware(
        device="cuda:0",
        identity=DeviceIdentity(type="cuda", name=name, num_cpus=2, total_memory_bytes=2**34),
        memory=DeviceMemory(total=2**34, free=2**33, available=2**33),
        precisions={"bf16": Capability(level="emulated", reason="no bf16 arithmetic", matmul_flops_per_second=1e12)},
        notes=("a note",),
    )
    shown = Read(hardware._repr_html_())
    assert shown.tags[:3] == ["div", "style", "h4"]
    assert "t4" not in shown.tags
    assert one_line(name) in shown.text
    assert [word for word in ("bf16", "1.00 TFLOP/s", "emulated", "8.00 GiB", "a note") if word not in shown.text] == []
