// When a job was queued, dispatched, started, gave its first token and was done.
import { h, setText } from "../dom.js";
import { duration, showTime } from "../format.js";

const STEPS = [
  ["Queued", "enqueued_ms", null, null],
  ["Dispatched", "dispatched_ms", "waited", "p-wait"],
  ["Started", "started_ms", "handed over in", "p-hand"],
  ["First token", "first_token_ms", "prompt read in", "p-first"],
  ["Done", "finished_ms", "written in", "p-run"],
];

export function timeline() {
  const phases = h("div", { class: "phases", "aria-hidden": "true" });
  const steps = STEPS.map(([name, field, word, phase]) => {
    const time = h("time");
    const took = h("span", { class: ["took", phase].filter(Boolean).join(" ") });
    const node = h("li", {}, h("b", {}, name), time, took);
    const part = phase === null ? null : h("i", { class: phase });
    if (part !== null) phases.append(part);
    return { node, time, took, field, word, part };
  });
  return {
    node: h("div", {}, phases, h("ol", { class: "timeline" }, ...steps.map((one) => one.node))),
    /** `now`: of Redis' clock, while the job goes on; the part under way ends there. */
    update(job, now) {
      let last = null;
      let isOpen = now !== null;
      const lengths = [];
      for (const step of steps) {
        const at = job[step.field];
        step.node.classList.toggle("is-reached", at !== null);
        showTime(step.time, at);
        const took = at !== null && last !== null ? Math.max(at - last, 0) : null;
        setText(step.took, took === null ? "" : `${step.word} ${duration(took)}`);
        if (step.part !== null) {
          const isUnderWay = isOpen && at === null && last !== null;
          if (isUnderWay) isOpen = false;
          step.part.classList.toggle("is-open", isUnderWay);
          lengths.push([step.part, isUnderWay ? Math.max(now - last, 0) : took ?? 0]);
        }
        if (at !== null) last = at;
      }
      const whole = lengths.reduce((sum, [, took]) => sum + took, 0);
      for (const [part, took] of lengths) {
        part.hidden = took === 0;
        // The gaps between parts take their share too; growing keeps the sum whole.
        part.style.flexGrow = whole > 0 ? took / whole : 0;
      }
      const total = steps.at(-1);
      if (job.finished_ms !== null && job.enqueued_ms !== null) {
        const all = duration(job.finished_ms - job.enqueued_ms);
        setText(total.took, `${total.took.textContent || "ended"}, ${all} in all`);
      }
    },
  };
}
