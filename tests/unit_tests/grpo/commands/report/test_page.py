# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The page in a real browser: keyboard, hostile texts, colours, widths, and its size."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_run import make_run
from playwright.sync_api import Browser, Page, sync_playwright

from torchtitan.grpo.commands import cli
from torchtitan.grpo.commands.report.command import Server
from torchtitan.grpo.commands.report.content import Run

HOSTILE = (
    "</script><script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>"
    "<a href='javascript:window.harmed=1'>x</a>{{nonce}}\u202eevil\u200b"
)
# What a label of Plotly would read as tags, and its templates as fields.
NAME = "reward/<img src=x onerror=harmed=1><a href='javascript:harmed=1'>%{x}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.fail("These tests need Chromium: apt-get install chromium")
    options = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of 1,000 steps, whose completions do not all fit."""
    folder = make_run(tmp_path_factory.mktemp("long"), 1000, groups=1, size=8)
    assert cli.run(["report", str(folder)]) == 0
    return folder / "report.html"


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a file. At the end, nothing may have been written to the console, and nothing asked of a network."""
    told: list[str] = []
    pages: list[Page] = []

    def open_page(file: Path, width: int = 1280, mode: str = "light") -> Page:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=mode)
        pages.append(page)
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on(
            "request",
            lambda request: None if request.url.startswith("file:") else told.append(request.url),
        )
        page.goto(file.as_uri())
        page.locator("[role=tab]").first.wait_for()
        return page

    yield open_page
    for page in pages:
        page.close()
    assert told == []


def wait_for_charts(page: Page) -> None:
    page.locator("figure .main-svg").first.wait_for(timeout=120_000)


def tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()
    page.locator(f"#tab-{name.lower()}[aria-selected=true]").wait_for()


def test_a_page_of_1000_steps_is_small_and_opens(long_run, opened):
    assert long_run.stat().st_size < 5e6
    page = opened(long_run)
    assert page.locator("#name").inner_text() == long_run.parent.name
    assert "1,000 of 1,000" in page.locator("#head").inner_text()
    advice = page.locator("ol.advice li").first
    assert "reward.judge.max_concurrent" in advice.inner_text()
    wait_for_charts(page)
    client = page.context.new_cdp_session(page)
    client.send("Performance.enable")
    metrics = {m["name"]: m["value"] for m in client.send("Performance.getMetrics")["metrics"]}
    # Processor time, which a busy machine stretches less than the time on the clock.
    assert metrics["ProcessTime"] < 10
    advice.get_by_role("link").click()
    page.locator("#chart-waits:focus").wait_for()
    tab(page, "Rollouts")
    assert "8,000 records of 1,000 steps. This page holds" in page.locator("main").inner_text()
    page.get_by_role("textbox", name="Step").fill("502")
    page.get_by_text("Step 502 is not in this page").wait_for()


def test_the_keyboard_reaches_what_the_model_wrote_at_step_12_for_prompt_7(tmp_path, opened):
    folder = make_run(tmp_path, 20)
    assert cli.run(["report", str(folder)]) == 0
    page = opened(folder / "report.html")
    key = page.keyboard
    page.locator("#mode").focus()
    key.press("Tab")  # to the chosen tab, from which arrows lead to the others
    for _ in range(3):
        key.press("ArrowRight")
    page.locator("#tab-rollouts:focus[aria-selected=true]").wait_for()
    page.get_by_role("textbox", name="Step").wait_for()
    for expected in ("main", "Text", "Step"):
        key.press("Tab") if expected != "main" else None
    key.type("12")
    key.press("Tab")
    key.type("7")
    key.press("Enter")
    page.locator(".list button:focus").wait_for()
    assert page.locator(".list button").count() == 8
    key.press("Enter")
    page.locator(".detail:focus").wait_for()
    assert "Step 12, prompt 7, completion 1 of 8" in page.locator(".detail").inner_text()
    key.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SELECT"
    assert (
        page.locator(".turn").nth(3).locator(".text").inner_text().strip()
        == "Step 12, prompt 7: done.<eos>"
    )
    key.press("Tab")
    key.press("ArrowRight")
    key.press("End")
    told = page.locator(".readout").inner_text()
    assert "logprob -" in told and "ratio " in told and "advantage " in told and "trained 1" in told
    for name in ("ratio", "advantage", "trained"):
        page.get_by_label("Colour tokens by").select_option(name)
        assert page.locator(".detail > .turn .t[style*=background]").count() > 10
    assert page.locator(".columns > *").count() == 8
    page.get_by_role("textbox", name="Text").fill("no such text")
    page.get_by_text("0 of 1,280 in this page").wait_for()


def test_hostile_texts_are_shown_and_do_nothing(tmp_path, opened):
    folder = make_run(tmp_path, 12, groups=1, size=2, **{NAME: 0.5, "servers/<b>x</b>/version": 3})
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for record in lines:
        record |= {
            "context": [{"role": HOSTILE, "trained": True, "num_tokens": 1, "text": HOSTILE}],
            "row": HOSTILE,
        }
        record |= {"finish_reason": HOSTILE, "columns": {HOSTILE: HOSTILE}, "server": HOSTILE}
        record["tokens"] = {"text": [HOSTILE], "logprob": [-1.0], "trained": [1]}
    (folder / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    start = folder / "starts/1/config.toml"
    start.write_text(start.read_text().replace('"A made run"', json.dumps(HOSTILE)))
    event = {"step": 1, "time": 1.0, "level": HOSTILE, "text": HOSTILE}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    summary = {
        "steps": 12,
        "dropped": {HOSTILE: 1},
        "causes": [{"cause": HOSTILE, "fraction": 1, "text": HOSTILE}],
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    assert cli.run(["report", str(folder)]) == 0
    page = opened(folder / "report.html")
    for name in ("Overview", "Time", "Curves", "Rollouts", "Settings", "Log"):
        tab(page, name)
        if name == "Rollouts":
            page.locator(".list button").first.click()
        else:
            page.locator("main figure, main table").first.wait_for()
        if name in ("Overview", "Time", "Curves"):
            wait_for_charts(page)
        if name != "Curves" and name != "Time":
            assert "<img src=x onerror=" in page.locator("body").inner_text(), name
        assert page.locator("main img, main a[href^=javascript], main script").count() == 0
        assert page.evaluate("window.harmed") is None
        text = page.locator("body").inner_text()
        assert "\u202e" not in text and "\u200b" not in text
    tab(page, "Rollouts")
    page.locator(".list button").first.click()
    assert "⟨U+202E⟩evil⟨U+200B⟩" in page.locator(".detail .turn").first.inner_text()


@pytest.mark.parametrize(
    ("width", "mode"),
    [
        (400, "dark"), (1280, "light"),
        *(pytest.param(*one, marks=pytest.mark.long) for one in [(400, "light"), (1280, "dark")]),
    ],
)  # fmt: skip
def test_every_part_fits_the_width_in_both_colours(long_run, opened, width, mode):
    page = opened(long_run, width, mode)
    assert page.evaluate("document.documentElement.dataset.mode") == mode
    for name in page.locator("[role=tab]").all_inner_texts():
        tab(page, name)
        page.locator("main figure, main table, main .list").first.wait_for(state="attached")
        if name == "Rollouts":
            page.locator(".list button").first.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert least_contrast(page) >= 4.5, name
    other = {"light": "dark", "dark": "light"}[mode]
    page.get_by_label("Colours").select_option(other)
    assert page.evaluate("document.documentElement.dataset.mode") == other
    assert least_contrast(page) >= 4.5


def least_contrast(page: Page) -> float:
    """The least contrast of the colours that text has with the page's two backgrounds."""
    return page.evaluate("""() => {
        const style = getComputedStyle(document.documentElement);
        const light = (name) => {
            const probe = document.createElement("i");
            probe.style.color = style.getPropertyValue(name);
            document.body.append(probe);
            const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
            probe.remove();
            const [r, g, b] = parts.map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const pairs = ["--text", "--soft", "--accent", "--warn"].flatMap((name) => ["--back", "--panel"].map((back) => [light(name), light(back)]));
        return Math.min(...pairs.map(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)));
    }""")


def test_runs_are_compared(tmp_path, opened):
    one = make_run(tmp_path / "one", 30, groups=1, size=2)
    two = make_run(tmp_path / "two", 30, groups=1, size=2, **{"reward/mean": 0.99})
    text = (two / "starts/1/config.toml").read_text().replace("lr = 1e-06", "lr = 5e-06")
    text += "\n[reward]\nnum_workers = 4\n"  # does not change what a reward means
    (two / "starts/1/config.toml").write_text(text)
    assert cli.run(["report", str(one), str(two), "-o", str(tmp_path / "both.html")]) == 0
    page = opened(tmp_path / "both.html")
    tab(page, "Compare")
    row = page.get_by_role("row").filter(has_text="reward/mean (higher is better)")
    assert row.locator("td.best").inner_text() == "0.99" and row.locator("td").count() == 3
    assert page.get_by_role("row").filter(has_text="optimizer.lr").locator("td").all_inner_texts() == [
        "optimizer.lr", "1e-06", "5e-06",
    ]  # fmt: skip
    wait_for_charts(page)
    page.get_by_label("Reward: what is shown").select_option("by seconds")
    page.get_by_role("link", name="chart").last.click()  # of what to change in the second run
    page.locator("#chart-waits:focus").wait_for()
    assert page.locator("#run").input_value() == "1"
    tab(page, "Settings")
    assert "5e-06" in page.locator("main").inner_text()


def test_rewards_of_other_functions_are_not_compared(tmp_path, opened):
    one, two = (make_run(tmp_path / name, 30, groups=1, size=2) for name in ("one", "two"))
    text = (two / "starts/1/config.toml").read_text()
    (two / "starts/1/config.toml").write_text(f'{text}\n[reward]\nfunctions = ["other"]\n')
    assert cli.run(["report", str(one), str(two), "-o", str(tmp_path / "both.html")]) == 0
    page = opened(tmp_path / "both.html")
    row = page.get_by_role("row").filter(has_text="reward/mean (settings differ: not comparable)")
    assert row.locator("td").count() == 3 and row.locator("td.best").count() == 0
    assert page.get_by_role("row").filter(has_text="seconds until the reward").count() == 0


def test_a_watched_page_shows_new_steps_by_itself(tmp_path, browser):
    folder = make_run(tmp_path, 20, groups=1, size=2)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:10]))
    with Server([Run(folder)], (0, 1 << 60), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        page = browser.new_page()
        told: list[str] = []
        page.on("console", lambda message: told.append(message.text))
        page.goto(server.url)
        page.get_by_text("10 of 20").wait_for()
        wait_for_charts(page)
        with (folder / "metrics.jsonl").open("a") as stream:
            stream.writelines(lines[10:])
        page.get_by_text("20 of 20").wait_for()
        page.close()
        server.shutdown()
        thread.join()
    assert told == []


def test_a_long_completion_is_coloured_as_far_as_the_page_has_its_tokens(tmp_path, opened):
    folder = make_run(tmp_path, 2, groups=1, size=1)
    record = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    tokens = {"text": [" x"] * 5000, "logprob": [-1.0] * 5000, "trained": [1] * 5000}
    parts = [(1, "prompt", "p"), (4500, "model", " x" * 4500), (500, "environment", "the end")]
    context = [
        {"role": r, "trained": r == "model", "num_tokens": n, "text": t} for n, r, t in parts
    ]
    (folder / "samples.jsonl").write_text(
        json.dumps(record | {"context": context, "tokens": tokens}) + "\n"
    )
    assert cli.run(["report", str(folder)]) == 0
    page = opened(folder / "report.html")
    tab(page, "Rollouts")
    page.locator(".list button").first.click()
    assert page.locator(".detail .t").count() == 4000
    assert "the page has 4,000 tokens" in page.locator(".turn.model").inner_text()
    assert page.locator(".turn").nth(2).locator(".text").inner_text() == "the end"
