// One job: what happened when, its text as it comes, attempts, errors, cancel.
import { get, jobPath, post } from "../api.js";
import { empty, h, setText } from "../dom.js";
import { NONE, count, duration } from "../format.js";
import { acting, complain, confirmed, notify } from "../notices.js";
import { stateBadge } from "../parts.js";
import { JobText } from "./job_text.js";
import { timeline } from "./timeline.js";

const TERMINAL = new Set(["succeeded", "failed", "cancelled", "expired"]);
const REFRESH_MS = 1000;

export function job({ live }, id) {
  const path = `/v1/admin/jobs/${jobPath(id)}`;
  const view = makeView(id, path);
  let job = null;
  let text = null;
  let loadedAt = 0;
  let left = false;

  async function load() {
    loadedAt = Date.now();
    try {
      const found = await get(path);
      if (left) return;
      job = found;
      view.update(found, live.latest?.at_ms ?? null);
      text ??= new JobText(view.place, `${path}/stream`, load);
    } catch (error) {
      if (error.status === 404 || error.status === 400) {
        view.missing(error.message);
        stop();
      } else if (error.status > 0) complain(error);
    }
  }

  const stop = live.on("snapshot", () => {
    const goesOn = job !== null && !TERMINAL.has(job.job.state);
    if (goesOn && Date.now() - loadedAt >= REFRESH_MS) load();
  });
  load();
  return {
    title: `Job ${id}`,
    node: view.node,
    leave() {
      left = true;
      stop();
      text?.close();
    },
  };
}

function makeView(id, path) {
  const state = stateBadge();
  const cancel = cancelButton(id, path);
  const steps = timeline();
  const facts = h("dl", { class: "facts" });
  const problem = h("div", { class: "problem", hidden: true });
  const place = h("div", { class: "outputs" });
  const input = inputCard();
  const body = h("div", { class: "view" }, problem,
    section("Timeline", steps.node), place, input.node, section("Facts", facts));
  const node = h("div", { class: "view" },
    h("div", { class: "view-head" },
      h("p", { class: "crumb" }, h("a", { href: "/dashboard/jobs", "data-link": true }, "← Jobs")),
      h("h1", { class: "job-id" }, id), state.node, h("div", { class: "end" }, cancel)),
    body);
  return {
    node,
    place,
    update(found, now) {
      const { job } = found;
      state.set(job.state);
      cancel.hidden = TERMINAL.has(job.state) || !found.may_cancel;
      steps.update(job, TERMINAL.has(job.state) ? null : now);
      showProblem(problem, job, found.error);
      input.update(found.input);
      facts.replaceChildren(...factsOf(found).map(([name, value]) =>
        h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    },
    missing(message) {
      cancel.hidden = true;
      body.replaceChildren(empty("There is no such job.", h("span", {}, message)));
    },
  };
}

function section(title, ...children) {
  return h("section", { class: "card" }, h("div", { class: "card-head" }, h("h2", {}, title)),
    h("div", { class: "card-body" }, ...children));
}

function cancelButton(id, path) {
  const button = h("button", { class: "button danger", type: "button", hidden: true }, "Cancel job");
  return acting(button, async () => {
    const yes = await confirmed("Cancel this job?",
      `${id} stops; the text it has made so far stays.`, "Cancel job", "Keep it");
    if (!yes) return;
    const { status } = await post(`${path}/cancel`);
    notify({
      cancelled: "The job is cancelled.",
      cancelling: "Its worker has been told to stop.",
    }[status] ?? `The job had ended before: ${status}.`);
  });
}

function showProblem(place, job, error) {
  const text = error?.message ?? job.last_error ?? job.problem;
  place.hidden = !text;
  if (!text) return;
  const isOver = TERMINAL.has(job.state);
  const head = error?.code ?? (isOver ? "error" : "last error");
  const words = `${head}: ${text}`;
  if (place.textContent !== words) {
    place.replaceChildren(h("strong", {}, `${head}: `), text);
  }
}

function inputCard() {
  const text = h("pre", { class: "text-out input", tabindex: "0", role: "region",
    "aria-label": "Input" });
  const node = h("section", { class: "card", hidden: true },
    h("div", { class: "card-head" }, h("h2", {}, "Input"),
      h("span", { class: "note end" }, "shown to its own tenant alone")), text);
  return {
    node,
    update(input) {
      node.hidden = input === null;
      if (input !== null) setText(text, input);
    },
  };
}

function factsOf({ job, usage, seed }) {
  const faults = `${count(job.attempts)} faults, ${count(job.lease_losses)} lost leases`;
  return [
    ["Model", job.adapter ? `${job.model}:${job.adapter}` : job.model],
    ["Tenant", job.tenant],
    ["Class, priority", `${job.job_class}, ${job.priority}`],
    ["Prompt", `${count(usage?.prompt_tokens ?? job.prompt_tokens)} tokens, bucket ${job.bucket}`],
    ["Output", usage === null ? `at most ${count(job.max_tokens)} tokens`
      : `${count(usage.completion_tokens)} of ${count(job.max_tokens)} tokens`],
    ["Attempts", faults],
    ["Given to workers", `epoch ${count(job.epoch)}`],
    ["Worker group", job.owner ?? NONE],
    ["Seed", seed],
    ["Idempotency key", job.idempotency_key ?? NONE],
    ["Deadline", job.deadline_ms === null ? "none"
      : `${duration(job.deadline_ms - job.enqueued_ms)} after enqueue`],
    ["Cancel", job.cancel_requested ? "requested" : "not requested"],
  ];
}
