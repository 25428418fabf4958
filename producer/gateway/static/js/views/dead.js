// Dead letters: jobs that failed for good. Run them once more, or remove them.
import { jobPath, post } from "../api.js";
import { empty, h, setText } from "../dom.js";
import { count, countOf, shortId, showTime } from "../format.js";
import { Loader } from "../loader.js";
import { acting, confirmed, notify } from "../notices.js";
import { listing } from "../parts.js";

export function dead({ live, me }) {
  const list = listing({
    title: "Newest first",
    label: "Dead letters",
    columns: [["Letter", "id"], ["Reason"], ["Error"], ["Tenant"], ["Class"],
      ["Buried", "number"], ["Requeued as", "id"], ["", "number"]],
    keyOf: (letter) => letter.id,
    row: (letter) => letterRow(letter, me, () => loader.load()),
    none: empty("No dead letters.",
      "A job comes here when it failed for good: faults beyond its attempts, or workers lost."),
  });
  const every = wholeList(me, () => loader.load());
  const loader = new Loader(() => "/v1/admin/dead", (page) => {
    list.set(page.data);
    setText(list.note, page.more
      ? `${count(page.data.length)} of ${countOf(page.total, "letter")}`
      : countOf(page.total, "letter"));
    every.set(page.total);
  });
  const stop = live.on("snapshot", () => loader.refresh());
  loader.load();
  return {
    title: "Dead letters",
    node: h("div", { class: "view" },
      h("div", { class: "view-head" }, h("h1", {}, "Dead letters"), every.node), list.node),
    leave() {
      stop();
      loader.stop();
    },
  };
}

/** Buttons for all letters at once. */
function wholeList(me, done) {
  let total = 0;
  const requeue = acting(h("button", { class: "button", type: "button" }, "Requeue all"), async () => {
    const yes = await confirmed(`Requeue ${countOf(total, "letter")}?`,
      "Each becomes one new job, however often this is done.", "Requeue all", "Leave them");
    if (!yes) return;
    await runAgain({ all: true });
    done();
  });
  const purge = acting(h("button", { class: "button danger", type: "button" }, "Purge all"), async () => {
    const yes = await confirmed(`Purge ${countOf(total, "letter")}?`,
      "They and what they keep cannot be brought back.", "Purge all", "Keep them");
    if (!yes) return;
    await remove({ all: true });
    done();
  });
  const node = h("div", { class: "end dialog-buttons", hidden: true }, requeue, purge);
  return {
    node,
    set(value) {
      total = value;
      node.hidden = total === 0 || !me.is_admin;
    },
  };
}

async function runAgain(body) {
  const { data } = await post("/v1/admin/dead/requeue", body);
  const problems = data.filter((one) => one.job === null);
  const made = data.length - problems.length;
  if (made > 0) notify(made === 1 ? `Requeued as ${data.find((one) => one.job).job}` : `${count(made)} jobs requeued.`);
  if (problems.length > 0) {
    notify(`${count(problems.length)} not requeued. The first: ${problems[0].problem}`, "bad");
  }
}

async function remove(body) {
  const { purged } = await post("/v1/admin/dead/purge", body);
  notify(purged === 1 ? "1 letter purged." : `${count(purged)} letters purged.`);
}

function letterRow(first, me, done) {
  const { id } = first;
  const buried = h("time");
  const again = h("td", { class: "id wide" });
  const requeue = acting(
    h("button", { class: "button small", type: "button", "aria-label": `Requeue ${id}` }, "Requeue"),
    async () => {
      await runAgain({ ids: [id] });
      done();
    });
  const purge = acting(
    h("button", { class: "button small danger", type: "button", "aria-label": `Purge ${id}` }, "Purge"),
    async () => {
      const yes = await confirmed("Purge this letter?",
        `${id} and what it keeps cannot be brought back.`, "Purge", "Keep it");
      if (!yes) return;
      await remove({ ids: [id] });
      done();
    });
  const name = first.is_job
    ? h("a", { href: `/dashboard/jobs/${jobPath(id)}`, "data-link": true }, shortId(id)) : id;
  const node = h("tr", {},
    h("th", { scope: "row", class: "id", title: id }, name),
    h("td", {}, first.reason),
    h("td", { class: "error wide" }, first.error ? `${first.error.code}: ${first.error.message}` : ""),
    h("td", {}, first.tenant), h("td", {}, first.job_class),
    h("td", { class: "number" }, buried), again,
    h("td", { class: "number actions" }, h("div", { class: "dialog-buttons" }, requeue, purge)));
  let shown = "";
  return {
    node,
    update(letter) {
      showTime(buried, letter.at_ms);
      requeue.hidden = !me.is_admin || !letter.is_job || letter.requeued_as !== null;
      purge.hidden = !me.is_admin;
      const { requeued_as } = letter;
      if (requeued_as === shown) return;
      shown = requeued_as;
      again.title = requeued_as ?? "";
      again.replaceChildren(requeued_as === null ? "–"
        : h("a", { href: `/dashboard/jobs/${jobPath(requeued_as)}`, "data-link": true },
          shortId(requeued_as)));
    },
  };
}
