// One answer of the playground: read as it streams, measured, stopped on request.
import { events, get, jobPath, request } from "../api.js";
import { setText } from "../dom.js";
import { count, duration, rate } from "../format.js";

const USAGE_WAIT_S = 5;

export class Answer {
  constructor({ node, said, figures }, talk) {
    Object.assign(this, { node, said, figures, talk });
    this.abort = new AbortController();
    this.text = "";
    this.pieces = 0;
    this.firstAt = null;
    this.lastAt = null;
    this.usage = null;
    this.reason = null;
    this.job = null;
  }

  /** Sends the request and shows the stream; returns the text, whole or not. */
  async run({ path, body }) {
    this.begun = performance.now();
    this.node.classList.add("is-running");
    // Whole answers are read out, not single pieces.
    this.said.setAttribute("aria-busy", "true");
    this.said.setAttribute("aria-live", "polite");
    setText(this.figures, "waiting for the first token");
    try {
      await this.read(path, body);
      this.show(this.reason === null ? "ended early" : this.reason);
    } catch (error) {
      if (error.name === "AbortError") {
        this.show("stopped");
        this.askUsage();
      } else this.fail(error);
    } finally {
      this.node.classList.remove("is-running");
      this.said.setAttribute("aria-busy", "false");
    }
    return this.text;
  }

  async read(path, body) {
    const response = await request(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: this.abort.signal,
    });
    this.job = response.headers.get("X-Tokenmill-Job");
    for await (const { data } of events(response)) {
      if (data === "[DONE]") return;
      this.take(JSON.parse(data));
    }
  }

  /** A stream that was stopped never says how many tokens there were; its job does. */
  async askUsage() {
    if (this.job === null || this.firstAt === null) return;
    try {
      const { usage } = await get(`/v1/jobs/${jobPath(this.job)}?wait=${USAGE_WAIT_S}`);
      if (usage === null) return;
      this.usage = usage;
      this.show("stopped");
    } catch (error) {
      if (error.name !== "AbortError") this.show(`stopped; tokens unknown: ${error.message}`);
    }
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (choice === undefined) return;
    if (choice.finish_reason) this.reason = choice.finish_reason;
    const piece = choice.delta?.content ?? choice.text ?? "";
    if (piece === "") return;
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    this.pieces += 1;
    this.text += piece;
    const follows =
      this.talk.scrollHeight - this.talk.scrollTop - this.talk.clientHeight < 40;
    this.said.append(piece);
    if (follows) this.talk.scrollTop = this.talk.scrollHeight;
    setText(this.figures, `first token ${duration(this.firstAt - this.begun)}`);
  }

  show(ending) {
    const parts = [];
    if (this.firstAt !== null) {
      parts.push(`first token ${duration(this.firstAt - this.begun)}`);
      const tokens = this.usage?.completion_tokens;
      if (tokens !== undefined) {
        const seconds = (this.lastAt - this.firstAt) / 1000;
        parts.push(`${count(tokens)} tokens`);
        if (seconds > 0 && tokens > 1) parts.push(`${rate((tokens - 1) / seconds)} tokens/s`);
      }
      parts.push(`${duration(performance.now() - this.begun)} in all`);
    }
    parts.push(ending);
    setText(this.figures, parts.join(" · "));
  }

  fail(error) {
    setText(this.figures, error.message);
    this.figures.classList.add("bad");
  }

  /** Ends the stream; the gateway cancels the job of a client that leaves. */
  stop() {
    this.abort.abort();
  }
}
