// Queues as a matrix: a row for each model and class, a column for each length bucket.
import { card, command, empty, h, keyedList, setText, table } from "../dom.js";
import { count, duration } from "../format.js";

const CLASSES = ["interactive", "bulk"];
const RESUME = "resume";

/** The number of jobs, its share of the deepest queue as a shade, the longest wait. */
function makeCell() {
  const shade = h("span", { class: "shade" });
  const figure = h("span", { class: "figure" }, "0");
  const oldest = h("span", { class: "oldest" });
  const node = h("td", { class: "number is-zero" }, shade, figure, oldest);
  return {
    node,
    set({ jobs, oldest_ms }, deepest) {
      setText(figure, count(jobs));
      setText(oldest, jobs > 0 && oldest_ms !== null ? duration(oldest_ms) : "");
      shade.style.opacity = jobs > 0 ? 0.06 + 0.24 * (jobs / deepest) : 0;
      node.classList.toggle("is-zero", jobs === 0);
    },
  };
}

function makeRow(buckets) {
  return ({ model, job_class }) => {
    const cells = new Map([...buckets, RESUME].map((bucket) => [bucket, makeCell()]));
    const all = h("td", { class: "number" });
    const node = h("tr", {}, h("th", { scope: "row" }, job_class,
      h("span", { class: "under-id" }, model)),
      ...[...cells.values()].map((cell) => cell.node), all);
    return {
      node,
      update({ depths, deepest }) {
        let sum = 0;
        for (const [bucket, cell] of cells) {
          const depth = depths.get(bucket) ?? { jobs: 0, oldest_ms: null };
          cell.set(depth, deepest);
          sum += depth.jobs;
        }
        setText(all, count(sum));
      },
    };
  };
}

/** Depths over partitions, by model and class, and in them by bucket. */
function rowsOf(view) {
  const rows = new Map();
  const row = (model, jobClass) => {
    const key = `${model}\n${jobClass}`;
    if (!rows.has(key)) rows.set(key, { key, model, job_class: jobClass, depths: new Map() });
    return rows.get(key);
  };
  for (const { model } of view.schedulers) CLASSES.forEach((name) => row(model, name));
  let deepest = 1;
  for (const depth of view.queues) {
    const { depths } = row(depth.model, depth.job_class || "handed back");
    const before = depths.get(depth.bucket) ?? { jobs: 0, oldest_ms: null };
    const jobs = before.jobs + depth.jobs;
    const ages = [before.oldest_ms, depth.oldest_ms].filter((age) => age !== null);
    depths.set(depth.bucket, { jobs, oldest_ms: ages.length ? Math.max(...ages) : null });
    deepest = Math.max(deepest, jobs);
  }
  return [...rows.values()].map((one) => ({ ...one, deepest }));
}

export function queues() {
  const none = empty("No model is served yet.", h("span", {}, "Start a worker: ",
    command("tokenmill work")));
  const { node, note } = card("Queues", none);
  let known = "";
  let update = null;
  let wrap = null;
  return {
    node,
    update(view) {
      const rows = rowsOf(view);
      const shape = view.buckets.join();
      if (rows.length > 0 && shape !== known) {
        known = shape;
        const made = table("Queues by class and length bucket", [
          ["Class"],
          ...view.buckets.map((bucket) => [bucket === "beyond" ? "beyond" : `≤ ${bucket}`, "number"]),
          ["again", "number"], ["All", "number"],
        ], { class: "matrix" });
        wrap?.remove();
        wrap = made.wrap;
        node.append(wrap);
        update = keyedList(made.body, (row) => row.key, makeRow(view.buckets));
      }
      none.hidden = rows.length > 0;
      if (wrap !== null) wrap.hidden = rows.length === 0;
      update?.(rows);
      setText(note, "waiting jobs and longest wait, by prompt tokens");
    },
  };
}
