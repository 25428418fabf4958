// Bulk runs: how far each is, and the button that stops it.
import { post } from "../api.js";
import { command, empty, h, setAttribute, setText } from "../dom.js";
import { count, countOf, duration, percent, rate, showTime } from "../format.js";
import { acting, confirmed, notify } from "../notices.js";
import { bar, listing, stateBadge } from "../parts.js";

const SILENT_MS = 30_000;

export function bulk({ live, me }) {
  const mayCancel = me.is_admin || me.scopes.includes("batch");
  const list = listing({
    title: "Newest first",
    label: "Bulk runs",
    columns: [["Run", "id short"], ["State"], ["Progress"], ["Failed", "number"],
      ["Jobs", "number"], ["Tokens", "number"], ["Items/s", "number"], ["Left", "number"],
      ["Begun", "number"], ["", "number"]],
    keyOf: (run) => run.run,
    row: (run) => runRow(run, mayCancel),
    none: empty("No bulk runs.", h("span", {}, "Run a file of requests: ",
      command("tokenmill bulk run FILE.jsonl -o OUT.jsonl")),
    h("span", {}, "or summarize documents: ",
      command("tokenmill bulk summarize DIR -o OUT.jsonl"))),
  });
  const node = h("div", { class: "view" },
    h("div", { class: "view-head" }, h("h1", {}, "Bulk runs")), list.node);
  const stop = live.on("snapshot", (view) => {
    list.set(view.runs);
    setText(list.note, countOf(view.runs.length, "run"));
  });
  return { title: "Bulk runs", node, leave: stop };
}

function runRow(first, mayCancel) {
  const state = stateBadge();
  const blocks = bar("used", "failed");
  const share = h("span", { class: "note" });
  const what = h("span", { class: "under-id" });
  const begun = h("time");
  const cells = Array.from({ length: 5 }, () => h("td", { class: "number" }));
  const cancel = cancelButton(first);
  const node = h("tr", {},
    h("th", { scope: "row", class: "id short",
      title: [first.run, first.name].filter(Boolean).join(" ") }, first.run, what),
    h("td", {}, state.node),
    h("td", { class: "wide" }, h("div", { class: "progress" }, blocks.node, share)),
    ...cells, h("td", { class: "number" }, begun), h("td", { class: "number actions" }, cancel));
  return {
    node,
    update(run) {
      // Lines that were refused are no items; what was cancelled was never done.
      const total = (run.total ?? run.fed) + run.refused;
      const failed = run.failed + run.refused;
      const done = run.settled - run.cancelled + run.refused;
      const isOpen = run.state === "open";
      const isAlone = isOpen && run.now_ms - run.driver_ms > SILENT_MS;
      state.set(isAlone ? "waiting" : run.state);
      node.title = isAlone ? "Its command is not running; run it again to go on." : "";
      setText(what, run.name || run.input_label || run.kind);
      blocks.set(total, done - failed, failed);
      setAttribute(blocks.node, "aria-label",
        `${done} of ${total} done, ${failed} failed, ${run.cancelled} cancelled`);
      setText(share, total > 0 ? [
        `${count(done)} of ${count(total)}${run.total === null ? "+" : ""}`,
        run.cancelled > 0 ? `${count(run.cancelled)} cancelled` : percent(done / total),
      ].join(", ") : isOpen ? "nothing fed yet" : "no items");
      const seconds = (run.updated_ms - run.created_ms) / 1000;
      const perSecond = seconds > 0 ? run.settled / seconds : 0;
      const left = isOpen && perSecond > 0 && run.total !== null
        ? ((run.total - run.settled) / perSecond) * 1000 : null;
      [
        count(failed),
        count(run.jobs),
        count(run.prompt_tokens + run.completion_tokens),
        rate(perSecond),
        duration(left),
      ].forEach((text, at) => setText(cells[at], text));
      cells[0].classList.toggle("bad", failed > 0);
      showTime(begun, run.created_ms);
      cancel.hidden = !isOpen || !mayCancel;
    },
  };
}

function cancelButton({ run }) {
  const button = h("button", {
    class: "button small danger", type: "button", "aria-label": `Cancel run ${run}`,
  }, "Cancel");
  return acting(button, async () => {
    const yes = await confirmed("Cancel this run?",
      `Open items of ${run} settle as cancelled; what is done stays.`, "Cancel run", "Keep it");
    if (!yes) return;
    await post(`/v1/admin/runs/${encodeURIComponent(run)}/cancel`);
    notify(`Run ${run} is being cancelled.`);
  });
}
