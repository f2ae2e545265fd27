"""Pages are readable on dark and light screens, and on small ones."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Open
from tests.browser.groups import ShownGroup
from tests.browser.pages import VIEWS

AA = 4.5  # WCAG 2.2, 1.4.3
AA_LARGE = 3.0
SIZES = {"phone": (360, 740), "tablet": (768, 1024), "wide": (2560, 1200)}

# Each text that is seen: its colour, and the opaque colour that it stands on.
TEXTS = """() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const brush = canvas.getContext("2d", { willReadFrequently: true });
  const over = (colours) => {
    brush.clearRect(0, 0, 1, 1);
    for (const colour of colours) {
      brush.fillStyle = colour;
      brush.fillRect(0, 0, 1, 1);
    }
    return [...brush.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const grounds = (node) => {
    const colours = [];
    for (let at = node; at; at = at.parentElement)
      colours.unshift(getComputedStyle(at).backgroundColor);
    return colours;
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const text = walker.currentNode.data.trim();
    if (!text || node.closest(".unseen, .skip, noscript") || !node.checkVisibility())
      continue;
    const style = getComputedStyle(node);
    const ink = node.closest("svg") ? style.fill : style.color;
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const ground = grounds(node);
    texts.push({ text, isLarge, ground: over(ground), ink: over([...ground, ink]) });
  }
  return texts;
}"""


def luminance(colour: list[int]) -> float:
    """Return the relative luminance of a colour of sRGB, as WCAG has it."""
    parts = [value / 255 for value in colour]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(text: dict[str, Any]) -> float:
    low, high = sorted((luminance(text["ink"]), luminance(text["ground"])))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_texts_have_enough_contrast(
    busy: ShownGroup, open_page: Open, view: str, scheme: str
) -> None:
    page = open_page(busy, color_scheme=scheme)
    page.open(view)
    page.stop()
    texts = page.page.evaluate(TEXTS)
    assert len(texts) > 20
    pale = {
        entry["text"]: round(contrast(entry), 2)
        for entry in texts
        if contrast(entry) < (AA_LARGE if entry["isLarge"] else AA)
    }
    assert pale == {}
    ground = page.page.evaluate(
        "getComputedStyle(document.documentElement).backgroundColor"
    )
    red = int(re.findall(r"\d+", ground)[0])
    assert (red < 128) == (scheme == "dark")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("view", VIEWS)
def test_page_does_not_scroll_sideways(
    busy: ShownGroup, open_page: Open, view: str, size: str
) -> None:
    width, height = SIZES[size]
    page = open_page(busy, viewport={"width": width, "height": height})
    page.open(view)
    page.stop()
    wide = page.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width
    for scroll in page.page.locator(".scroll:visible").all():
        box = scroll.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width


def test_cut_off_table_scrolls_by_keys(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy, viewport={"width": 390, "height": 844})
    page.open("overview")
    place = (
        page.page.get_by_role("region", name="Workers").locator("table").locator("..")
    )
    expect(place).to_have_attribute("tabindex", "0")
    place.focus()
    page.page.keyboard.press("ArrowRight")
    page.page.wait_for_function(
        "(place) => place.scrollLeft > 0", arg=place.element_handle()
    )
    head = page.table("Workers").get_by_role("rowheader", name="web")
    expect(head).to_be_in_viewport()


def test_state_of_the_group_stays_visible(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy, viewport={"width": 390, "height": 844})
    page.open("overview")
    page.page.mouse.wheel(0, 5000)
    expect(page.page.locator(".links")).to_be_in_viewport()
    expect(page.page.locator("#group-words")).to_be_in_viewport()


def test_columns_keep_their_width_as_numbers_change(
    busy: ShownGroup, open_page: Open
) -> None:
    page = open_page(busy)
    page.open("overview", "?sort=worker")
    script = """[...document.querySelectorAll("h2, th, .chart, .totals > div")].map(
      (node) => JSON.stringify(node.getBoundingClientRect()))"""
    before = page.page.evaluate(script)
    seen = page.page.evaluate("looks.length")
    page.wait_for(f"looks.length > {seen + 4}")
    assert page.page.evaluate(script) == before
