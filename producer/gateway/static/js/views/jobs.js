// The newest jobs: by state, by part of an id. The address holds the filter.
import { command, empty, h, setText } from "../dom.js";
import { count, countOf } from "../format.js";
import { Loader } from "../loader.js";
import { complain } from "../notices.js";
import { listing } from "../parts.js";
import { JOB_COLUMNS, jobRow } from "./job_rows.js";

const STATES = ["", "delayed", "queued", "dispatched", "running", "retrying", "succeeded",
  "failed", "cancelled", "expired"];
const TYPING_MS = 250;
const LIMIT = 100;

export function jobs({ live }) {
  const asked = new URLSearchParams(location.search);
  const wanted = asked.get("state") ?? "";
  if (!STATES.includes(wanted)) {
    complain(new Error(`There is no state "${wanted}": jobs of any state are shown.`));
  }
  const state = h("select", { id: "job-state" }, ...STATES.map((name) =>
    h("option", { value: name, selected: name === wanted }, name || "any state")));
  const search = h("input", {
    id: "job-search", type: "search", placeholder: "id, or a part of one",
    autocomplete: "off", spellcheck: "false", value: asked.get("q") ?? "",
  });
  const list = listing({
    title: "Newest first",
    label: "Jobs",
    columns: JOB_COLUMNS,
    keyOf: (job) => job.id,
    row: jobRow,
    none: h("div"),
  });
  const found = h("p", { class: "visually-hidden", role: "status" });
  const none = list.node.querySelector("div:not(.card-head):not(.table-wrap)");
  const loader = new Loader(() => query(state.value, search.value.trim()), (page) => {
    list.set(page.data);
    none.replaceChildren(nothing(state.value, search.value.trim()));
    const more = page.more ? `the newest ${count(LIMIT)}; narrow the search for others` : "";
    setText(list.note, more || countOf(page.data.length, "job"));
    setText(found, countOf(page.data.length, "job"));
  });
  const changed = () => {
    const words = new URLSearchParams();
    if (state.value) words.set("state", state.value);
    if (search.value.trim()) words.set("q", search.value.trim());
    history.replaceState(null, "", `${location.pathname}${words.size ? `?${words}` : ""}`);
    loader.load();
  };
  let typing = null;
  state.addEventListener("change", changed);
  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(changed, TYPING_MS);
  });
  const node = h("div", { class: "view" },
    h("div", { class: "view-head" }, h("h1", {}, "Jobs")),
    h("div", { class: "toolbar", role: "search" },
      h("div", { class: "field" }, h("label", { for: "job-state" }, "State"), state),
      h("div", { class: "field grow" }, h("label", { for: "job-search" }, "Search"), search)),
    found, list.node);
  const stop = live.on("snapshot", () => loader.refresh());
  loader.load();
  return {
    title: "Jobs",
    node,
    leave() {
      stop();
      clearTimeout(typing);
      loader.stop();
    },
  };
}

function query(state, text) {
  const words = new URLSearchParams({ limit: LIMIT });
  if (state) words.set("state", state);
  if (text) words.set("q", text);
  return `/v1/admin/jobs?${words}`;
}

function nothing(state, text) {
  if (state || text) {
    return empty("No such job among the newest 10,000.",
      "Another state or a shorter part of the id may find it.");
  }
  return empty("No jobs yet.", h("span", {}, "Submit one in the ",
    h("a", { href: "/dashboard/playground", "data-link": true }, "playground"), " or with ",
    command('tokenmill submit "Why is the sky blue?"')));
}
