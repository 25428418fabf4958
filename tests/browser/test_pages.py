"""The dashboard's pages: live figures, both themes, both widths, keyboard alone."""

import re
from collections.abc import Iterator
from typing import Literal

import pytest
from playwright.sync_api import Page, expect
from support.browser_pages import Visit, shoot
from support.gateway_thread import RunningGateway
from support.pools import MODEL, UpProcess
from support.waiting import wait_until_sync

from tokenmill import Prompt, Sampling, SyncClient
from tokenmill.shared.messages import JobClass

PAGES = ("Overview", "Jobs", "Bulk", "Dead letters", "Playground")
Theme = Literal["light", "dark"]
LONG = Sampling(max_tokens=1500, ignore_eos=True)
LONGER = Sampling(max_tokens=4000, ignore_eos=True)
NARROW = 390
BACKGROUND: dict[Theme, str] = {
    "light": "rgb(246, 247, 249)",
    "dark": "rgb(15, 18, 22)",
}


@pytest.fixture(scope="module")
def load(mill: SyncClient) -> Iterator[list[str]]:
    """Some jobs that are done, and more than run at a time that are not."""
    done = mill.submit(Prompt("a short one that is done", model=MODEL))
    done.result(timeout=60)
    live = Prompt("live " * 40, model=MODEL, tenant="acme", sampling=LONG)
    bulk = Prompt(
        "in bulk " * 30, model=MODEL, job_class=JobClass.BULK, sampling=LONGER
    )
    later = Prompt("later", model=MODEL, tenant="patient", delay_s=900)
    jobs = mill.submit_many([live] * 8 + [bulk] * 30 + [later])
    yield [done.id, *(job.id for job in jobs)]
    for job in jobs:
        job.cancel()


def number(page: Page, name: str) -> int:
    tile = page.locator(".tile", has_text=name).locator("dd").first.inner_text()
    return int(re.sub(r"\D", "", tile) or 0)


def wait_live(page: Page) -> None:
    expect(page.locator("#link-state")).to_have_text("Live")


def scrolls_sideways(page: Page) -> bool:
    return page.evaluate(
        "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    )


# --- live figures ------------------------------------------------------------
def test_the_overview_shows_the_pool_as_it_is(
    visit: Visit, gateway: RunningGateway, mill: SyncClient, load: list[str]
) -> None:
    page = visit(gateway.base)
    wait_live(page)
    rows = page.locator(".matrix tbody tr").filter(has_text=MODEL)
    in_bulk = rows.filter(has_text="bulk").locator("td.number").last
    wait_until_sync(
        lambda: number(page, "Waiting") == int(in_bulk.inner_text()) > 10,
        what="jobs that wait in bulk",
    )
    groups = page.get_by_role("table", name="Worker groups")
    expect(groups.get_by_text(re.compile(r"^1[56] of 16$"))).to_be_visible()
    expect(groups.get_by_role("img").first).to_have_attribute(
        "aria-label", re.compile(r"KV blocks: \d+ used, \d+ cached, \d+ free")
    )
    tenants = page.get_by_role("table", name="Tenants with waiting jobs")
    expect(tenants.get_by_role("rowheader")).to_have_text(["default", "patient"])
    processes = page.get_by_role("table", name="Processes of the pool")
    expect(processes.get_by_role("rowheader", name="worker")).to_be_visible()
    newest = page.get_by_role("table", name="Newest jobs")
    expect(newest.locator("tbody tr")).to_have_count(12)
    new = mill.submit(Prompt("one more", model=MODEL, tenant="newcomer"))
    expect(newest.get_by_text("newcomer")).to_be_visible()  # without a reload
    new.cancel()


def test_charts_draw_the_hour_and_say_it_in_words(
    visit: Visit, gateway: RunningGateway
) -> None:
    page = visit(gateway.base)
    chart = page.get_by_role("img", name=re.compile("^Throughput"))
    expect(chart).to_have_attribute(
        "aria-label", re.compile(r"now \d+, lowest 100, highest 159")
    )
    assert page.locator(".chart .line").count() == 10
    path = page.locator(".chart .line").first.get_attribute("d") or ""
    # A point for each sample; those that are an hour old by now are left out.
    assert path.count("L") > 200
    chart.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".chart .cursor")).to_have_count(1)
    expect(page.locator(".chart-plot").first).to_have_attribute(
        "aria-label", re.compile(r"^\d\d:\d\d:\d\d: tokens/s \d+$")
    )
    page.keyboard.press("Escape")
    expect(page.locator(".chart .cursor")).to_have_count(0)


def test_nothing_moves_when_figures_change(
    visit: Visit, gateway: RunningGateway, load: list[str]
) -> None:
    page = visit(gateway.base)
    wait_live(page)
    expect(page.locator(".chart .line")).to_have_count(10)
    places = (
        "[...document.querySelectorAll('.card, .tile')]"
        ".map(e => `${e.offsetTop} ${e.offsetHeight}`).join()"
    )
    before = page.evaluate(places)
    assert page.evaluate(
        "new Promise(done => { const age = document.querySelector("
        "'.groups td:last-child'); new MutationObserver(() => done(true)).observe("
        "age, {childList: true, subtree: true, characterData: true}); })"
    )  # figures came in
    assert page.evaluate(places) == before


def test_times_are_local_with_the_exact_time_in_utc(
    visit: Visit, gateway: RunningGateway, load: list[str]
) -> None:
    page = visit(gateway.base, "/dashboard/jobs", timezone_id="Asia/Kathmandu")
    time = page.locator("tbody time").first
    utc = time.get_attribute("title") or ""
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} UTC", utc)
    minutes = lambda text: int(text[:2]) * 60 + int(text[3:5])  # noqa: E731
    assert (minutes(time.inner_text()) - minutes(utc[11:])) % 1440 == 5 * 60 + 45


# --- looks ------------------------------------------------------------
@pytest.mark.parametrize("width", [1280, NARROW])
def test_every_page_fits_and_has_both_themes(
    visit: Visit, gateway: RunningGateway, load: list[str], width: int
) -> None:
    page = visit(gateway.base, width=width)
    wait_live(page)
    for name in PAGES:
        page.get_by_role("navigation").get_by_role("link", name=name).click()
        expect(page.locator("h1")).to_have_text(
            re.compile(name if name != "Bulk" else "Bulk runs")
        )
        expect(page).to_have_title(re.compile("tokenmill$"))
        if name == "Overview":
            expect(page.locator(".chart .line")).to_have_count(10)
        if name == "Jobs":
            expect(page.locator("tbody tr").first).to_be_visible()
        look_at(page, f"{name.lower().replace(' ', '-')}-{width}")
    page.get_by_role("link", name="Jobs", exact=True).click()
    page.get_by_label("Search").fill(load[1])
    page.locator(f"th[title='{load[1]}'] a").click()
    expect(page.locator(".text-out").first).to_contain_text("live live")
    look_at(page, f"job-{width}")


@pytest.mark.parametrize("width", [320, NARROW])
def test_the_navigation_fits_a_telephone_with_its_badge(
    visit: Visit, gateway: RunningGateway, width: int
) -> None:
    page = visit(gateway.base, width=width)
    wait_live(page)
    room = page.evaluate(
        """() => {
          const badge = document.getElementById("dead-count");
          badge.hidden = false;
          badge.textContent = "12";
          const last = document.querySelector("[data-page=playground]");
          return innerWidth - last.getBoundingClientRect().right;
        }"""
    )
    shoot(page, f"navigation-{width}")
    assert room >= 4
    link = page.get_by_role("navigation").get_by_role("link", name="Dead letters")
    expect(link).to_be_visible()


def look_at(page: Page, name: str) -> None:
    """Holds width and colours against what they must be, in both themes."""
    for theme, colour in BACKGROUND.items():
        page.emulate_media(color_scheme=theme)
        expect(page.locator("body")).to_have_css("background-color", colour)
        assert not scrolls_sideways(page), f"{name} is wider than its window"
        shoot(page, f"{name}-{theme}")


def test_the_theme_button_overrides_the_system_and_is_remembered(
    visit: Visit, gateway: RunningGateway
) -> None:
    page = visit(gateway.base, theme="light")
    button = page.get_by_role("button", name="Theme")
    expect(button).to_have_accessible_name("Theme: as the system")
    button.click()
    button.click()
    expect(button).to_have_accessible_name("Theme: dark")
    dark = BACKGROUND["dark"]
    expect(page.locator("body")).to_have_css("background-color", dark)
    page.reload()
    expect(page.locator("body")).to_have_css("background-color", dark)
    expect(button).to_have_accessible_name("Theme: dark")


# --- keyboard ------------------------------------------------------------
def has_ring(page: Page) -> bool:
    return page.evaluate(
        "getComputedStyle(document.activeElement).outlineStyle === 'solid'"
    )


def test_a_job_is_found_and_its_cancel_reached_by_keyboard_alone(
    visit: Visit, gateway: RunningGateway, mill: SyncClient
) -> None:
    job = mill.submit(Prompt("by keyboard", model=MODEL, sampling=LONGER))
    page = visit(gateway.base)
    wait_live(page)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    assert has_ring(page)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Jobs", exact=True)).to_be_focused()
    assert has_ring(page)
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_be_focused()  # a reader hears where it is
    page.keyboard.press("Tab")
    expect(page.get_by_label("State")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.type(job.id[-12:])
    expect(page.locator("tbody tr")).to_have_count(1)
    page.keyboard.press("Tab")  # the table scrolls, so it takes focus
    page.keyboard.press("Tab")
    assert has_ring(page)
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text(job.id)
    expect(page.get_by_role("button", name="Cancel job")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Cancel job")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Keep it")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.get_by_role("button", name="Cancel job")).to_be_focused()
    assert job.info().state in ("queued", "dispatched", "running")
    job.cancel()


def test_the_skip_link_leads_past_the_navigation(
    visit: Visit, gateway: RunningGateway
) -> None:
    page = visit(gateway.base, "/dashboard/jobs")
    expect(page.get_by_label("State")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("#main$"))
    page.keyboard.press("Tab")
    expect(page.get_by_label("State")).to_be_focused()


# --- the frame ------------------------------------------------------------
def test_back_and_forward_and_unknown_pages(
    visit: Visit, gateway: RunningGateway, pool: UpProcess
) -> None:
    page = visit(gateway.base, expected="404")
    page.get_by_role("link", name="Jobs", exact=True).click()
    page.get_by_role("link", name="Bulk").click()
    page.go_back()
    expect(page.locator("h1")).to_have_text("Jobs")
    page.go_forward()
    expect(page.locator("h1")).to_have_text("Bulk runs")
    answer = page.goto(f"{gateway.base}/dashboard/nowhere")
    assert answer is not None
    assert answer.status == 404
    expect(page.get_by_text("There is no such page.")).to_be_visible()
    page.goto(f"{gateway.base}/dashboard/jobs/{MODEL}.0.{'0' * 31}")
    expect(page.get_by_text("There is no such job.")).to_be_visible()


def test_the_policy_refuses_what_is_not_ours(
    visit: Visit, gateway: RunningGateway
) -> None:
    page = visit(gateway.base, expected="Content Security Policy|Trusted")
    refused = page.evaluate(
        "['innerHTML', 'onclick', 'script'].map(way => { try {"
        "  if (way === 'innerHTML') document.body.innerHTML = '<i>x</i>';"
        "  if (way === 'onclick') document.body.setAttribute('onclick', 'alert(1)');"
        "  if (way === 'script') document.createElement('script').text = 'alert(1)';"
        "  return 'let through' } catch (error) { return error.name } })"
    )
    assert refused == ["TypeError"] * 3
