"""What a person does on the dashboard: ask, stop, cancel, requeue, log in, find."""

import asyncio
import re
import threading
from collections.abc import Coroutine
from typing import Any

from playwright.sync_api import Page, expect
from support.browser_pages import Visit, shoot
from support.dead_letters import bury
from support.gateway_thread import RunningGateway
from support.pools import MODEL, UpProcess
from support.waiting import PATIENCE_S, wait_until_sync

from tokenmill import Prompt, Sampling, SyncClient
from tokenmill.shared.api_keys import KeyStore, Scope
from tokenmill.shared.bulk.keys import new_run_id
from tokenmill.shared.bulk.messages import RunSpec
from tokenmill.shared.bulk.store import RunStore
from tokenmill.shared.redis import connect

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>alert(1)</script>"
IN_SIGHT = """button => {
  const box = button.closest(".table-wrap").getBoundingClientRect();
  const place = button.getBoundingClientRect();
  return place.width > 0 && place.right <= box.right;
}"""
NOTE_LENGTHS = """() => {
  window.lengths = [];
  new MutationObserver(() => {
    const said = document.querySelector(".turn[data-role=assistant] .said");
    if (said) window.lengths.push(said.textContent.length);
  }).observe(document.body, {childList: true, subtree: true, characterData: true});
}"""
LONG = Sampling(max_tokens=4000, ignore_eos=True)


def apart(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs something asynchronous; playwright has the loop of this thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(work)))
    thread.start()
    thread.join(PATIENCE_S)
    return found[0]


async def make_key(url: str, tenant: str, *scopes: Scope) -> str:
    client = connect(url)
    try:
        return (await KeyStore(client).create(tenant, scopes))[0]
    finally:
        await client.aclose()


async def begin_run(url: str, tenant: str = "default") -> str:
    """A bulk run of ten items and a bad line; seven have settled, one badly."""
    client = connect(url)
    try:
        run = RunStore(client, new_run_id())
        await run.create(RunSpec(kind="run", tenant=tenant, name=f"of {tenant}"))
        await run.beat()
        fields = {
            "total": 10,
            "fed": 10,
            "settled": 7,
            "succeeded": 6,
            "failed": 1,
            "jobs": 7,
            "refused": 1,
        }
        await client.hset(run.keys.record, mapping=fields)
        return run.run_id
    finally:
        await client.aclose()


async def state_of_run(url: str, run_id: str) -> str:
    client = connect(url)
    try:
        return (await RunStore(client, run_id).view()).state
    finally:
        await client.aclose()


def log_in(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Log in").click()


# --- the playground ------------------------------------------------------------
def test_a_prompt_streams_with_its_figures(
    visit: Visit, gateway: RunningGateway
) -> None:
    page = visit(gateway.base, "/dashboard/playground")
    expect(page.get_by_label("Model")).to_have_value(MODEL)
    page.get_by_text("Text", exact=True).click()
    page.get_by_label("Text to go on from").fill(f"tell me {HOSTILE}")
    page.evaluate(NOTE_LENGTHS)
    page.keyboard.press("Enter")
    said = page.locator(".turn[data-role=assistant] .said")
    expect(page.locator(".figures")).to_have_text(
        re.compile(r"first token .+ · \d+ tokens · [\d.]+ tokens/s · .+ in all · stop")
    )
    expect(said).to_have_text(f"tell me {HOSTILE}")
    assert page.evaluate("new Set(window.lengths).size") > 3  # it came piece by piece
    expect(said).to_have_attribute("aria-live", "polite")
    assert page.title() == "Playground – tokenmill"  # noqa: RUF001
    shoot(page, "playground-answer")


def test_stop_ends_the_answer_and_cancels_the_job(
    visit: Visit, gateway: RunningGateway, mill: SyncClient
) -> None:
    page = visit(gateway.base, "/dashboard/playground")
    page.get_by_label("Most tokens").fill("4000")
    page.get_by_label("Your message").fill("and so on " * 100)
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".turn[data-role=assistant] .said")).not_to_be_empty()
    job = mill.jobs(limit=1)[0].id
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".figures")).to_have_text(
        re.compile(r"\b[1-9]\d* tokens.* stopped$")
    )
    expect(page.get_by_label("Your message")).to_be_focused()
    wait_until_sync(
        lambda: mill.job(job).info().state == "cancelled", what="a cancelled job"
    )


# --- jobs ------------------------------------------------------------
def test_a_job_streams_live_and_is_cancelled(
    visit: Visit, gateway: RunningGateway, mill: SyncClient
) -> None:
    job = mill.submit(Prompt(f"{HOSTILE} ", model=MODEL, sampling=LONG))
    page = visit(gateway.base, f"/dashboard/jobs/{job.id}")
    output = page.get_by_role("log", name="Output")
    expect(output).to_contain_text("<img src=x")
    before = len(output.inner_text())
    page.wait_for_function(
        "length => document.querySelector('.text-out').textContent.length > length",
        arg=before,
    )
    expect(page.get_by_role("region", name="Input")).to_have_text(f"{HOSTILE} ")
    expect(page.locator(".timeline .is-reached")).to_have_count(4)
    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel job").click()
    expect(page.locator(".view-head .state")).to_have_text("cancelled")
    expect(page.get_by_role("button", name="Cancel job")).to_be_hidden()
    expect(page.locator(".timeline .is-reached")).to_have_count(5)
    expect(page.locator(".problem")).to_contain_text("cancelled on request")
    assert mill.job(job.id).info().state == "cancelled"
    assert page.title() != "owned"
    page.reload()
    expect(output).to_contain_text("<img src=x")  # what it had made is kept


def test_jobs_are_filtered_by_state_and_found_by_part_of_an_id(
    visit: Visit, gateway: RunningGateway, mill: SyncClient
) -> None:
    later = mill.submit(Prompt("later", model=MODEL, delay_s=600))
    done = mill.submit(Prompt("now", model=MODEL))
    done.result(timeout=60)
    page = visit(gateway.base, "/dashboard/jobs")
    table = page.get_by_role("table", name="Jobs")
    page.get_by_label("State").select_option("delayed")
    expect(table.locator("tbody tr")).to_have_count(1)
    expect(table.get_by_role("rowheader")).to_have_attribute("title", later.id)
    page.get_by_label("State").select_option("")
    page.get_by_label("Search").fill(done.id[-8:])
    expect(table.locator(f"th[title='{done.id}']")).to_be_visible()
    expect(table.locator("tbody tr")).to_have_count(1)
    assert f"q={done.id[-8:]}" in page.url  # the address can be passed on
    page.reload()
    expect(table.locator("tbody tr")).to_have_count(1)
    expect(table.get_by_role("rowheader")).to_have_attribute("title", done.id)
    page.get_by_label("Search").fill("nothing-like-it")
    expect(page.get_by_text("No such job among the newest 10,000.")).to_be_visible()
    later.cancel()


# --- dead letters and runs ------------------------------------------------------------
def test_dead_letters_are_requeued_and_purged(
    visit: Visit, gateway: RunningGateway, mill: SyncClient, pool: UpProcess
) -> None:
    first = apart(bury(pool.url, HOSTILE))
    second = apart(bury(pool.url, "boom"))
    page = visit(gateway.base, "/dashboard/dead")
    expect(page.locator("#dead-count")).to_have_text("2")
    table = page.get_by_role("table", name="Dead letters")
    expect(table.get_by_text(f"engine_error: {HOSTILE}")).to_be_visible()
    shoot(page, "dead-letters")
    page.get_by_role("button", name=f"Requeue {first}").click()
    row = table.locator("tbody tr").filter(has_text=HOSTILE)
    expect(row.get_by_role("link")).to_have_count(2)  # the letter's, and its new job's
    again = mill.dead_letters([first])[0].requeued_as
    assert again is not None
    assert mill.job(again).info().state == "queued"
    expect(page.locator(".toast")).to_have_text(re.compile(re.escape(again)))
    expect(row.get_by_role("button", name="Requeue")).to_be_hidden()
    page.get_by_role("button", name=f"Purge {second}").click()
    page.get_by_role("dialog").get_by_role("button", name="Keep it").click()
    assert len(mill.dead_letters()) == 2
    page.get_by_role("button", name="Purge all").click()
    page.get_by_role("dialog").get_by_role("button", name="Purge all").click()
    expect(page.get_by_text("No dead letters.")).to_be_visible()
    expect(page.locator("#dead-count")).to_be_hidden()
    assert mill.dead_letters() == []
    mill.job(again).cancel()


def test_a_bulk_run_shows_its_progress_and_is_cancelled(
    visit: Visit, gateway: RunningGateway, pool: UpProcess
) -> None:
    run = apart(begin_run(pool.url))
    page = visit(gateway.base, "/dashboard/bulk")
    row = page.locator("tbody tr").filter(has_text=run)
    expect(row).to_contain_text("of default")
    expect(row).to_contain_text("8 of 11")  # with the line that was refused
    assert row.get_by_role("button", name="Cancel").evaluate(IN_SIGHT)
    expect(row.get_by_role("img")).to_have_accessible_name(
        "8 of 11 done, 2 failed, 0 cancelled"
    )
    shoot(page, "bulk-run")
    row.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel run").click()
    expect(row.locator(".state")).to_have_text(re.compile("cancel"))
    assert apart(state_of_run(pool.url, run)) in ("cancelling", "cancelled")


# --- keys ------------------------------------------------------------
def test_a_key_logs_in_and_out_and_sees_its_own_tenant_alone(
    visit: Visit, guarded: RunningGateway, mill: SyncClient, pool: UpProcess
) -> None:
    mine = mill.submit(Prompt("mine", model=MODEL, tenant="acme"))
    other = mill.submit(Prompt("a secret of globex", model=MODEL, tenant="globex"))
    other.result(timeout=60)
    apart(begin_run(pool.url, "globex"))
    key = apart(make_key(pool.url, "acme", Scope.READ))
    page = visit(guarded.base, f"/dashboard/jobs/{mine.id}", expected="401|404")
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    log_in(page, "tm-wrong")
    expect(page.get_by_role("alert")).to_contain_text("unknown or revoked")
    expect(page.get_by_label("API key")).to_be_focused()
    shoot(page, "login")
    log_in(page, key)
    expect(page.locator("h1")).to_have_text(mine.id)  # where it wanted to go
    (cookie,) = page.context.cookies()
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    assert key not in cookie["value"]
    expect(page.locator("#who")).to_have_text("Shows acme")
    page.get_by_role("link", name="Jobs", exact=True).click()
    expect(
        page.get_by_role("table", name="Jobs").get_by_text("acme").first
    ).to_be_visible()
    expect(page.get_by_text("globex")).to_have_count(0)
    page.get_by_role("link", name="Overview").click()
    expect(page.get_by_role("table", name="Newest jobs")).to_be_visible()
    expect(page.get_by_text("globex")).to_have_count(0)
    expect(page.get_by_text("Processes")).to_have_count(0)
    page.get_by_role("link", name="Bulk").click()
    expect(page.get_by_text("No bulk runs.")).to_be_visible()
    page.goto(f"{guarded.base}/dashboard/jobs/{other.id}")
    expect(page.get_by_text("There is no such job.")).to_be_visible()
    assert "secret" not in page.content()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    assert page.context.cookies() == []
    page.context.add_cookies([cookie])  # as one who had copied it
    page.goto(f"{guarded.base}/dashboard/")
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()


def test_an_administrator_sees_every_tenant_and_nobodys_prompt(
    visit: Visit, guarded: RunningGateway, mill: SyncClient, pool: UpProcess
) -> None:
    job = mill.submit(Prompt("x" * 30, model=MODEL, tenant="globex"))
    job.result(timeout=60)
    key = apart(make_key(pool.url, "ops", Scope.ADMIN))
    page = visit(guarded.base, f"/dashboard/jobs/{job.id}")
    log_in(page, key)
    expect(page.locator("#who")).to_have_text("Shows all tenants")
    expect(page.locator(".facts")).to_contain_text("globex")
    expect(page.get_by_role("region", name="Input")).to_be_hidden()


def test_a_key_that_may_only_submit_has_the_playground(
    visit: Visit, guarded: RunningGateway, pool: UpProcess
) -> None:
    key = apart(make_key(pool.url, "acme", Scope.INFERENCE))
    page = visit(guarded.base, "/dashboard/")
    log_in(page, key)
    expect(page.get_by_role("heading", name="Playground")).to_be_visible()
    expect(page.get_by_label("Model")).to_have_value(MODEL)
    page.locator("#prompt").fill("hi")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".figures")).to_contain_text("in all")
    page.get_by_role("link", name="Jobs", exact=True).click()
    expect(page.get_by_text("needs a key with the scope read")).to_be_visible()
    shoot(page, "needs-scope")
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()


def test_a_key_that_may_only_look_cannot_send(
    visit: Visit, guarded: RunningGateway, pool: UpProcess
) -> None:
    key = apart(make_key(pool.url, "acme", Scope.READ))
    page = visit(guarded.base, "/dashboard/jobs?state=failed")
    log_in(page, key)
    # Where it wanted to go, with what it wanted to see there.
    expect(page.get_by_label("State")).to_have_value("failed")
    page.get_by_role("link", name="Playground").click()
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    expect(page.get_by_text("needs the scope inference")).to_be_visible()
    page.goto(f"{guarded.base}/dashboard/jobs?state=nonsense")
    expect(page.get_by_text('There is no state "nonsense"')).to_be_visible()


def test_login_leads_nowhere_else(
    visit: Visit, guarded: RunningGateway, pool: UpProcess
) -> None:
    key = apart(make_key(pool.url, "acme", Scope.READ))
    page = visit(guarded.base, "/login?next=//evil.example/dashboard/")
    log_in(page, key)
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    assert page.url == f"{guarded.base}/dashboard/"


# --- the connection ------------------------------------------------------------
def test_a_lost_connection_is_shown_and_comes_back(
    visit: Visit, gateway: RunningGateway, mill: SyncClient
) -> None:
    page = visit(gateway.base, expected="ERR_|Failed to load")
    expect(page.locator("#link-state")).to_have_text("Live")
    place = "document.querySelector('h1').getBoundingClientRect().top"
    before = page.evaluate(place)
    gateway.stop()
    try:
        expect(page.get_by_role("alert")).to_contain_text("The connection is lost")
        expect(page.locator("#link-state")).to_have_text("Not connected")
        assert page.evaluate(place) == before  # it lies over the page
        shoot(page, "lost")
    finally:
        gateway.start()
    expect(page.locator("#link-state")).to_have_text("Live")
    expect(page.locator("#lost")).to_be_hidden()
    job = mill.submit(Prompt("after the break", model=MODEL, tenant="afterwards"))
    newest = page.get_by_role("table", name="Newest jobs")
    expect(newest.get_by_text("afterwards")).to_be_visible()
    job.cancel()
