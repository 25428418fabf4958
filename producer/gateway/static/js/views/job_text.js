// A job's output as it comes. After a break the browser says how far it had read, and
// the stream goes on there: nothing flickers and nothing is there twice.
import { h, setText } from "../dom.js";
import { count } from "../format.js";

const FLUSH_MS = 40;

export class JobText {
  constructor(place, path, onEnd) {
    this.place = place;
    this.choices = new Map();
    this.timer = null;
    this.source = new EventSource(path);
    this.source.addEventListener("message", (event) => this.add(JSON.parse(event.data)));
    this.source.addEventListener("end", () => {
      this.flush();
      this.close();
      this.say("complete");
      for (const { text } of this.choices.values()) {
        if (text.textContent === "") text.textContent = "The job made no text.";
        text.setAttribute("aria-busy", "false");
      }
      onEnd();
    });
    this.choice(0);
  }

  choice(index) {
    let choice = this.choices.get(index);
    if (choice !== undefined) return choice;
    const text = h("pre", {
      class: "text-out is-waiting", tabindex: "0", role: "log", "aria-live": "polite",
      "aria-busy": "true", "aria-label": index === 0 ? "Output" : `Output, choice ${index + 1}`,
    }, "No text yet.");
    const note = h("span", { class: "note end" }, "waiting");
    const title = index === 0 ? "Output" : `Output, choice ${index + 1}`;
    this.place.append(h("section", { class: "card" },
      h("div", { class: "card-head" }, h("h2", {}, title), note), text));
    choice = { text, note, tokens: 0, waiting: [], reason: null, isNew: true };
    this.choices.set(index, choice);
    return choice;
  }

  add(delta) {
    const choice = this.choice(delta.choice ?? 0);
    choice.tokens += delta.token_ids?.length ?? 0;
    choice.waiting.push(delta.text ?? "");
    choice.reason = delta.finish_reason ?? choice.reason;
    // The log of a long job comes all at once: it is written once, not piece by piece.
    this.timer ??= setTimeout(() => this.flush(), FLUSH_MS);
  }

  flush() {
    clearTimeout(this.timer);
    this.timer = null;
    for (const choice of this.choices.values()) {
      const { text, waiting } = choice;
      if (waiting.length === 0) continue;
      if (choice.isNew) {
        choice.isNew = false;
        text.classList.remove("is-waiting");
        text.replaceChildren();
      }
      const follows = text.scrollHeight - text.scrollTop - text.clientHeight < 24;
      text.append(waiting.splice(0).join(""));
      if (follows) text.scrollTop = text.scrollHeight;
      setText(choice.note, `${count(choice.tokens)} tokens, ${choice.reason ?? "streaming"}`);
    }
  }

  say(word) {
    for (const choice of this.choices.values()) {
      if (/streaming|waiting/.test(choice.note.textContent)) {
        setText(choice.note, `${count(choice.tokens)} tokens, ${word}`);
      }
    }
  }

  close() {
    clearTimeout(this.timer);
    this.source.close();
  }
}
