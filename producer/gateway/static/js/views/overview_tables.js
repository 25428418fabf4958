// The tables of the overview: worker groups, tenants, processes, newest jobs.
import { command, empty, h, setAttribute, setText } from "../dom.js";
import { NONE, count, duration, percent, rate, showTime } from "../format.js";
import { bar, listing, stateBadge } from "../parts.js";
import { jobRow, JOB_COLUMNS } from "./job_rows.js";

export function groups() {
  const list = listing({
    title: "Worker groups",
    label: "Worker groups",
    columns: [["Group", "id"], ["State"], ["KV blocks"],
      ["Running", "number"], ["Tokens/s", "number"], ["Step", "number"],
      ["Prefix hits", "number"], ["Preempted", "number"], ["Heartbeat", "number"]],
    keyOf: (group) => group.group,
    row: groupRow,
    none: empty("No worker is alive.", h("span", {}, "Start one: ", command("tokenmill work"))),
  });
  list.node.classList.add("groups");
  list.note.append(
    ...["used", "cached", "free"].map((name) => h("span", { class: `key key-${name}` }, name)));
  return { node: list.node, update: (view) => list.set(view.groups) };
}

function groupRow(first) {
  const blocks = bar("used", "cached");
  const kv = h("span", { class: "note" });
  const state = stateBadge();
  const [running, tokens, step, hits, preempted, age] =
    Array.from({ length: 6 }, () => h("td", { class: "number" }));
  const node = h("tr", {}, h("th", { scope: "row", class: "id", title: first.group }, first.group,
    h("span", { class: "under-id" }, first.model)),
    h("td", {}, state.node),
    h("td", { class: "wide" }, h("div", { class: "kv" }, blocks.node, kv)),
    running, tokens, step, hits, preempted, age);
  return {
    node,
    update(group) {
      state.set(group.state);
      blocks.set(group.pool_blocks, group.used_blocks, group.cached_blocks);
      setText(kv, `${count(group.used_blocks)} + ${count(group.cached_blocks)} of ` +
        count(group.pool_blocks));
      kv.title = `${group.used_blocks} used, ${group.cached_blocks} cached, ` +
        `${group.free_blocks} free`;
      setAttribute(blocks.node, "aria-label", `KV blocks: ${kv.title}`);
      setText(running, `${count(group.running)} of ${count(group.max_running)}`);
      setText(tokens, rate(group.tokens_per_s));
      setText(step, duration(group.step_ms));
      setText(hits, group.prefix_hit_rate === null ? NONE : percent(group.prefix_hit_rate));
      setText(preempted, count(group.preemptions));
      setText(age, duration(group.age_ms));
    },
  };
}

export function tenants(me) {
  const list = listing({
    title: me.is_admin ? "Tenants waiting" : "Your jobs waiting",
    label: "Tenants with waiting jobs",
    columns: [["Tenant"], ["Jobs", "number"], ["Prompt tokens", "number"], ["Later", "number"]],
    keyOf: (tenant) => tenant.name,
    row: ({ name }) => {
      const cells = Array.from({ length: 3 }, () => h("td", { class: "number" }));
      return {
        node: h("tr", {}, h("th", { scope: "row" }, name), ...cells),
        update({ jobs, tokens, later_jobs }) {
          [jobs, tokens, later_jobs].forEach((value, at) => setText(cells[at], count(value)));
        },
      };
    },
    none: empty("Nothing waits.", "Each job has found a worker, or none was submitted."),
    stacks: false,
  });
  const isWaiting = (tenant) => tenant.jobs > 0 || tenant.later_jobs > 0;
  return { node: list.node, update: (view) => list.set(view.tenants.filter(isWaiting)) };
}

export function processes() {
  const list = listing({
    title: "Processes",
    label: "Processes of the pool",
    columns: [["Kind"], ["Host"], ["PID", "number"], ["Version"], ["Started", "number"]],
    keyOf: (card) => `${card.kind} ${card.id}`,
    row: (first) => {
      const started = h("time");
      return {
        node: h("tr", {}, h("th", { scope: "row" }, first.kind), h("td", {}, first.host),
          h("td", { class: "number" }, String(first.pid)), h("td", {}, first.version),
          h("td", { class: "number" }, started)),
        update: (card) => showTime(started, card.started_ms),
      };
    },
    none: empty("No process has announced itself.", "They do so every few seconds."),
    stacks: false,
  });
  return {
    node: list.node,
    update(view) {
      const idle = view.schedulers.filter((shard) => shard.active === null);
      list.set(view.processes);
      setText(list.note, idle.length === 0 ? "" :
        `no active scheduler for ${idle.map((one) => `${one.model}:${one.partition}`).join(", ")}`);
      list.note.classList.toggle("bad", idle.length > 0);
    },
  };
}

export function recent() {
  const list = listing({
    title: "Newest jobs",
    label: "Newest jobs",
    columns: JOB_COLUMNS,
    keyOf: (job) => job.id,
    row: jobRow,
    none: empty("No jobs yet.", h("span", {}, "Submit one in the ",
      h("a", { href: "/dashboard/playground", "data-link": true }, "playground"), " or with ",
      command('tokenmill submit "Why is the sky blue?"'))),
  });
  list.node.classList.add("is-short");
  list.note.append(h("a", { href: "/dashboard/jobs", "data-link": true }, "All jobs"));
  return { node: list.node, update: (view) => list.set(view.recent) };
}
