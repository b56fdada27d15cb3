"""The report in a real browser: what is drawn, hover, zoom, themes, paper.

Needs Chromium, which is no Python package: ``apt-get install chromium``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from loosestep.lab.report import make_report, write_report
from loosestep.lab.runs import Run, read_run
from tests.support.report_runs import (
    DDP,
    LOCAL,
    TWO_LEVELS,
    Made,
    val_loss,
    worker_records,
    write_run,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH")

WHITE, DARK = "rgb(255, 255, 255)", "rgb(21, 24, 28)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        # The sandbox needs rights that a container has not; the page is our own.
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    folders = [write_run(root / f"{i}", made) for i, made in enumerate((DDP, LOCAL, TWO_LEVELS))]
    write_report(folders, root / "report.html")
    return root / "report.html"


class Tab:
    """A page that keeps what it complained about and what it asked for."""

    def __init__(self, browser: Browser, **options) -> None:
        self.page = browser.new_page(viewport={"width": 1200, "height": 900}, **options)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, path: Path) -> Page:
        self.page.goto(path.as_uri())
        return self.page


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    tab = Tab(browser)
    yield tab
    tab.page.close()
    assert tab.complaints == []


def chart(page: Page, title: str) -> Locator:
    figure = page.locator("figure").filter(has=page.get_by_role("heading", name=title, exact=True))
    return figure.locator("svg.plot")


def domain(drawn: Locator) -> tuple[float, float]:
    low, high = drawn.get_attribute("data-low"), drawn.get_attribute("data-high")
    assert low is not None
    assert high is not None
    return float(low), float(high)


def ticks(drawn: Locator) -> list[str]:
    return [text or "" for text in drawn.locator(".x-tick").all_text_contents()]


def pixel(drawn: Locator, value: float) -> float:
    """Return where a value of x is drawn: margins are 58 and 14 pixels wide."""
    low, high = domain(drawn)
    box = drawn.bounding_box()
    assert box is not None
    return 58 + (value - low) / (high - low) * (box["width"] - 72)


def drag(page: Page, drawn: Locator, start: float, stop: float) -> None:
    drawn.scroll_into_view_if_needed()
    box = drawn.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + start, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + stop, box["y"] + 60, steps=4)
    page.mouse.up()


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_everything_is_drawn_and_nothing_is_loaded(tab, report):
    page = tab.open(report)
    assert page.locator("svg.plot").count() == 4
    for title in ("against seconds", "against steps", "against bytes sent per worker"):
        drawn = chart(page, title)
        assert drawn.locator(".line.thin").count() == 3
        assert drawn.locator(".line.marked").count() == 3
        assert all(
            len(d) > 200
            for d in drawn.locator(".line.thin").evaluate_all(
                "lines => lines.map(line => line.getAttribute('d'))"
            )
        )
    assert chart(page, "against steps, by level").locator(".line.marked").count() == 3
    assert page.locator("#timeline svg text").filter(has_text="worker").count() == 4
    assert page.locator("#bytes .part").count() == 4  # one sent by each run, one copied
    assert tab.requests == [report.as_uri()]


def test_hover_shows_the_values_of_all_runs(tab, report):
    """At step 100 all three were evaluated; validation is the last number of a row."""
    page = tab.open(report)
    drawn = chart(page, "against steps")
    drawn.hover(position={"x": pixel(drawn, 100), "y": 80})
    tip = page.locator(".tip")
    assert tip.locator("b").inner_text() == "step 100"
    rows = [row.split("\t") for row in tip.locator("tbody tr").all_inner_texts()]
    assert [row[0].strip() for row in rows] == [DDP.name, LOCAL.name, TWO_LEVELS.name]
    for row, made in zip(rows, (DDP, LOCAL, TWO_LEVELS), strict=True):
        records = [r for rank in range(4) for r in worker_records(made, rank)]
        losses = [r["loss"] for r in records if r["event"] == "step" and r["step"] == 100]
        assert row[1] == f"{sum(losses) / 4:.3f}"
        assert row[2] == f"{val_loss(made, 100):.3f}"
    page.mouse.move(0, 0)
    assert tip.is_hidden()


def test_hover_says_when_a_run_has_ended(tab, report):
    page = tab.open(report)
    drawn = chart(page, "against seconds")
    drawn.hover(position={"x": pixel(drawn, 99.6), "y": 80})
    first, second, _ = page.locator(".tip tbody tr").all_inner_texts()
    assert f"{val_loss(DDP, 150):.3f}" in first
    assert "ended at 17.35 s" in second


def test_drag_zooms_and_double_click_goes_back(tab, report):
    page = tab.open(report)
    drawn = chart(page, "against steps")
    before, whole = ticks(drawn), domain(drawn)
    drag(page, drawn, pixel(drawn, 50), pixel(drawn, 100))
    assert domain(drawn) == pytest.approx((50, 100), abs=1)
    assert ticks(drawn) != before
    drawn.dblclick(position={"x": 200, "y": 60})
    assert (ticks(drawn), domain(drawn)) == (before, whole)
    drag(page, drawn, 300, 200)  # from right to left does too
    reset = page.get_by_role("button", name="Reset zoom").nth(1)
    assert domain(drawn) != whole
    reset.click()
    assert domain(drawn) == whole
    assert reset.is_disabled()


def test_keyboard(tab, report):
    page = tab.open(report)
    drawn = chart(page, "against steps")
    whole = domain(drawn)
    drawn.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".tip").inner_text().startswith("step 100")
    page.keyboard.press("+")
    low, high = domain(drawn)
    assert whole[0] < low < high < whole[1]
    page.keyboard.press("0")
    assert domain(drawn) == whole


def test_bytes_far_apart_are_on_a_logarithmic_axis(tab, report):
    page = tab.open(report)
    drawn = chart(page, "against bytes sent per worker")
    assert ticks(drawn) == ["1 MB", "10 MB", "100 MB", "1 GB"]
    page.get_by_role("button", name="log x").nth(2).click()
    assert ticks(drawn)[0] == "0 bytes"


def test_a_run_can_be_hidden(tab, report):
    page = tab.open(report)
    page.locator("#legend button").first.click()
    assert chart(page, "against seconds").locator(".line").count() == 4
    assert domain(chart(page, "against seconds"))[1] < 30  # the slowest is gone
    page.locator("#legend button").first.click()
    assert chart(page, "against seconds").locator(".line").count() == 6


def test_timeline_moves_zooms_and_tells(tab, report):
    page = tab.open(report)
    page.select_option("#run", label=LOCAL.name)
    rows = page.locator("svg.rows").last
    low, high = domain(rows)
    assert high - low == pytest.approx(3.3 * 0.694e6, rel=0.01)
    drag(page, rows, 600, 400)
    assert domain(rows)[0] > low
    assert domain(rows)[1] - domain(rows)[0] == pytest.approx(high - low)
    rows.hover(position={"x": 500, "y": 60})
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    assert domain(rows)[1] - domain(rows)[0] == pytest.approx(0.8 * (high - low))
    rows.dblclick(position={"x": 500, "y": 60})
    assert domain(rows) == (low, high)
    page.get_by_role("button", name="Whole run").click()
    assert domain(rows)[0] == 0


def test_timeline_names_what_is_under_the_pointer(tab, report):
    """A middle sync: worker 0 waits for 0.05 s, and sends for 0.3 s, most of it while computing."""
    page = tab.open(report)
    page.select_option("#run", label=LOCAL.name)
    rows = page.locator("svg.rows").last
    spans = [r for r in worker_records(LOCAL, 0) if r["event"] == "span" and r["step"] == 96]
    wait = next(span for span in spans if span["kind"] == "wait")
    box, (low, high) = rows.bounding_box(), domain(rows)
    assert box is not None
    middle = (wait["begin"] + wait["end"]) / 2 * 1e6
    x = 84 + (middle - low) / (high - low) * (box["width"] - 98)
    rows.hover(position={"x": x, "y": 50})
    told = page.locator(".tip").inner_text()
    assert told.startswith("worker 0, ")
    long = (wait["end"] - wait["begin"]) * 1e3
    assert re.search(rf"step 96: waits for world, {long:.0f}[.\d]* ms", told), told
    assert "step 96: sends over world, 300 ms" in told


def test_dark_and_light(browser, report):
    tab = Tab(browser, color_scheme="dark")
    page = tab.open(report)
    assert background(page) == DARK
    chooser = page.get_by_role("button", name="Theme")
    chooser.click()
    assert (background(page), chooser.inner_text()) == (WHITE, "Theme: light")
    chooser.click()
    page.emulate_media(color_scheme="light")
    assert (background(page), chooser.inner_text()) == (DARK, "Theme: dark")
    assert tab.complaints == []
    page.close()


def test_paper_is_light_and_has_everything(browser, report):
    tab = Tab(browser, color_scheme="dark")
    page = tab.open(report)
    page.evaluate("""addEventListener("beforeprint", () => { window.seen = {
        open: document.querySelectorAll("details[open]").length,
        width: document.querySelector("svg.plot").getAttribute("width") }; })""")
    assert page.pdf(format="A4").startswith(b"%PDF")
    assert page.evaluate("window.seen") == {"open": 3, "width": "690"}
    assert page.locator("details[open]").count() == 0  # as it was
    page.emulate_media(media="print", color_scheme="dark")
    assert background(page) == WHITE
    assert page.locator("#theme").is_hidden()
    assert page.locator(".tool").first.is_hidden()
    assert page.locator("svg.plot").first.is_visible()
    assert tab.complaints == []
    page.close()


@pytest.mark.parametrize("width", [320, 400, 800])
def test_narrow_screens_need_no_sideways_scrolling(tab, report, width):
    tab.page.set_viewport_size({"width": width, "height": 800})
    page = tab.open(report)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    drawn = chart(page, "against steps").bounding_box()
    assert drawn is not None
    assert drawn["width"] <= width


def test_strings_of_a_run_do_not_run(tab, tmp_path):
    nasty = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    folder = write_run(tmp_path / "run", replace(LOCAL, name=nasty), config={nasty: nasty})
    write_report([folder], tmp_path / "report.html")
    page = tab.open(tmp_path / "report.html")
    assert page.locator("h1").inner_text() == nasty
    assert page.locator("#legend button").inner_text() == nasty
    assert page.locator("img").count() == 0


def test_a_poor_run_still_makes_a_page(tab, tmp_path):
    """One step, no evaluations, no spans, no bytes, no waiting."""
    folder = write_run(tmp_path / "run", Made(name="poor", steps=1))
    for rank in range(4):
        (folder / f"rank-{rank}.jsonl").write_text(
            '{"event": "step", "at": 0.5, "step": 1, "loss": null}\n', encoding="utf-8"
        )
    write_report([folder], tmp_path / "report.html")
    page = tab.open(tmp_path / "report.html")
    assert "No timeline was recorded." in page.locator("#timeline").inner_text()
    assert "No bytes were recorded." in page.locator("#bytes").inner_text()
    assert "No drift was recorded" in page.locator("#drift").inner_text()


@pytest.mark.long
def test_a_hundred_thousand_steps_stay_quick(tab, tmp_path):
    short = read_run(write_run(tmp_path / "run", replace(DDP, steps=1)))
    records = worker_records(replace(DDP, steps=100_000, eval_every=1000), 0)
    output = tmp_path / "report.html"
    output.write_text(make_report([Run(tmp_path, short.info, {0: records})]), encoding="utf-8")
    assert output.stat().st_size < 2_000_000
    page = tab.open(output)
    drawn = chart(page, "against steps")
    assert domain(drawn) == (0, 100_000)
    begun = page.evaluate("performance.now()")
    drag(page, drawn, 100, 400)
    page.get_by_role("button", name="Whole run").click()
    assert page.evaluate("performance.now()") - begun < 2000
    assert len(drawn.locator(".line.thin").get_attribute("d") or "") < 60_000
