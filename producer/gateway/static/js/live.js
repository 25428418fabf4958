// The one connection that brings a view of the pool each second, and whether it holds.
import { get } from "./api.js";

const SILENT_MS = 6000;

/** Stands for the connection of a key that may not look: nothing ever comes. */
export const NO_LIVE = { latest: null, on: () => () => {} };

/** Follows `/v1/admin/events`. Each listener gets the newest view at once, then each.

    A page that nobody looks at has no connection: a browser has few for one host.
 */
export class Live {
  constructor(onState) {
    this.latest = null;
    this.listeners = new Map();
    this.onState = onState;
    this.heardAt = 0;
    this.source = null;
    this.isAsking = false;
    setInterval(() => this.check(), 1000);
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.pause();
      else this.connect();
    });
    addEventListener("pagehide", () => this.pause());
    addEventListener("pageshow", (event) => event.persisted && this.connect());
    this.connect();
  }

  connect() {
    this.pause();
    this.heardAt = Date.now();
    this.source = new EventSource("/v1/admin/events");
    this.source.addEventListener("error", () => this.onState("lost"));
    for (const name of ["snapshot", "sample", "problem"]) {
      this.source.addEventListener(name, (event) => this.take(name, event));
    }
  }

  pause() {
    this.source?.close();
    this.source = null;
  }

  take(name, event) {
    this.heardAt = Date.now();
    const value = JSON.parse(event.data);
    if (name === "problem") {
      this.onState("lost", value.message);
      return;
    }
    this.onState("live");
    if (name === "snapshot") this.latest = value;
    for (const listener of this.listeners.get(name) ?? []) listener(value);
  }

  // A browser gives up after some answers (a proxy's 502): then we begin anew. It also
  // never notices a connection that is open and silent.
  async check() {
    if (this.source === null || this.isAsking) return;
    const isSilent = Date.now() - this.heardAt > SILENT_MS;
    if (this.source.readyState !== EventSource.CLOSED && !isSilent) return;
    this.onState("lost");
    this.isAsking = true;
    try {
      await get("/v1/admin/me"); // a session that is over leads to the login
      if (!document.hidden) this.connect();
    } catch {
      // It is not back yet; the next turn asks again.
    } finally {
      this.isAsking = false;
    }
  }

  on(name, listener) {
    const set = this.listeners.get(name) ?? new Set();
    this.listeners.set(name, set.add(listener));
    if (name === "snapshot" && this.latest !== null) listener(this.latest);
    return () => set.delete(listener);
  }
}
