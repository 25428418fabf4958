// One job as a row of a table; the same on the overview and on the page of jobs.
import { jobPath } from "../api.js";
import { h, setText } from "../dom.js";
import { count, duration, shortId, showTime } from "../format.js";
import { stateBadge } from "../parts.js";

export const JOB_COLUMNS = [["Job", "id"], ["State"], ["Class"], ["Tenant"],
  ["Prompt", "number"], ["Waited", "number"], ["First token", "number"],
  ["Total", "number"], ["Enqueued", "number"]];

const between = (from, to) => (from !== null && to !== null ? to - from : null);

export function jobRow(first) {
  const state = stateBadge();
  const cells = Array.from({ length: 4 }, () => h("td", { class: "number" }));
  const enqueued = h("time");
  const kind = h("td");
  const tenant = h("td");
  const node = h("tr", {},
    h("th", { scope: "row", class: "id", title: first.id },
      h("a", { href: `/dashboard/jobs/${jobPath(first.id)}`, "data-link": true },
        shortId(first.id))),
    h("td", {}, state.node), kind, tenant, ...cells,
    h("td", { class: "number" }, enqueued));
  return {
    node,
    update(job) {
      state.set(job.state);
      node.title = job.problem ?? "";
      setText(kind, job.job_class);
      setText(tenant, job.tenant);
      const from = job.enqueued_ms;
      [
        count(job.prompt_tokens),
        duration(between(from, job.started_ms)),
        duration(between(from, job.first_token_ms)),
        duration(between(from, job.finished_ms)),
      ].forEach((text, at) => setText(cells[at], text));
      showTime(enqueued, from);
    },
  };
}
