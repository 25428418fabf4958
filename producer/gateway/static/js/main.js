// Starts the dashboard: who is here, which page, and the live connection.
import { get, post, toLogin } from "./api.js";
import { command, empty, h } from "./dom.js";
import { count } from "./format.js";
import { Live, NO_LIVE } from "./live.js";
import { complain } from "./notices.js";
import { setUpTheme } from "./theme.js";
import { bulk } from "./views/bulk.js";
import { dead } from "./views/dead.js";
import { job } from "./views/job.js";
import { jobs } from "./views/jobs.js";
import { overview } from "./views/overview.js";
import { playground } from "./views/playground.js";

const ROOT = "/dashboard/";
const PAGES = { "": overview, jobs, bulk, dead, playground };
const main = document.getElementById("main");
let leave = () => {};

function pageOf(path) {
  const rest = path.startsWith(ROOT) ? path.slice(ROOT.length) : "";
  if (rest.startsWith("jobs/")) {
    return { name: "jobs", view: job, argument: decodeURIComponent(rest.slice(5)) };
  }
  const name = rest.replace(/\/$/, "");
  return { name: name || "overview", view: PAGES[name] };
}

const mayLook = (me) => me.is_admin || me.scopes.includes("read");

function needsScope(me) {
  const has = me.scopes.join(", ") || "none";
  const mayAsk = me.scopes.includes("inference") ? ": it may use the playground." : ".";
  return empty("This page needs a key with the scope read.",
    h("span", {}, `The one you logged in with has ${has}${mayAsk}`),
    command(`tokenmill keys create --tenant ${me.tenant} --scope read`));
}

/** Shows the page of the address; focus goes to its heading when someone went there. */
function show(context, { moveFocus }) {
  leave();
  const { name, view, argument } = pageOf(location.pathname);
  for (const link of document.querySelectorAll("[data-page]")) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (view === undefined) {
    main.replaceChildren(empty("There is no such page.", "The list beside has all of them."));
    leave = () => {};
    return;
  }
  if (view !== playground && !mayLook(context.me)) {
    main.replaceChildren(needsScope(context.me));
    leave = () => {};
    document.title = "tokenmill";
    return;
  }
  const page = view(context, argument);
  leave = page.leave ?? (() => {});
  main.replaceChildren(page.node);
  document.title = `${page.title} – tokenmill`;
  scrollTo(0, 0);
  if (moveFocus) {
    const heading = main.querySelector("h1");
    heading?.setAttribute("tabindex", "-1");
    heading?.focus({ preventScroll: true });
  }
}

function showLink(state, message) {
  const place = document.getElementById("link-state");
  const bar = document.getElementById("lost");
  const words = { live: "Live", lost: "Not connected" };
  if (place.dataset.state !== state) {
    place.dataset.state = state;
    place.textContent = words[state];
  }
  const text = message ?? "The connection is lost. Figures stand still until it is back.";
  if (state === "lost" && bar.textContent !== text) bar.textContent = text;
  bar.hidden = state !== "lost";
}

function showWho(me) {
  const place = document.getElementById("who");
  const name = document.createElement("strong");
  name.textContent = me.is_admin ? "all tenants" : me.tenant;
  place.replaceChildren(mayLook(me) ? "Shows " : "Acts for ", name);
  const logout = document.getElementById("logout");
  logout.hidden = me.auth === "none";
  logout.addEventListener("click", async () => {
    try {
      await post("/logout");
      toLogin();
    } catch (error) {
      complain(error);
    }
  });
}

function followLinks(context) {
  const go = (path) => {
    history.pushState(null, "", path);
    show(context, { moveFocus: true });
  };
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[data-link]");
    const isPlain = event.button === 0 && !event.metaKey && !event.ctrlKey &&
      !event.shiftKey && !event.altKey;
    if (link === null || link === undefined || !isPlain) return;
    event.preventDefault();
    go(link.getAttribute("href"));
  });
  addEventListener("popstate", () => show(context, { moveFocus: true }));
  return go;
}

async function start() {
  setUpTheme(document.getElementById("theme"));
  const me = await get("/v1/admin/me");
  showWho(me);
  const live = mayLook(me) ? new Live(showLink) : NO_LIVE;
  if (live === NO_LIVE) {
    document.getElementById("link-state").textContent = "No live view";
    // Where everybody begins there is nothing for this key.
    if (location.pathname === ROOT) history.replaceState(null, "", `${ROOT}playground`);
  }
  const context = { me, live, go: null };
  context.go = followLinks(context);
  live.on("snapshot", (view) => {
    const badge = document.getElementById("dead-count");
    badge.hidden = !view.dead_letters;
    badge.textContent = count(view.dead_letters);
  });
  show(context, { moveFocus: false });
}

start().catch((error) => {
  if (error.status === 401) return;
  main.replaceChildren(empty("The dashboard cannot start.", error.message));
});
