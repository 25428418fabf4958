// Lists that are read from the gateway and again every few seconds.
import { get } from "./api.js";
import { complain } from "./notices.js";

const REFRESH_MS = 2000;

/** Loads a page of data, newest request only, and again at most so often. */
export class Loader {
  constructor(path, show) {
    this.path = path;
    this.show = show;
    this.at = 0;
    this.abort = null;
  }

  refresh() {
    if (Date.now() - this.at >= REFRESH_MS && !document.hidden) this.load();
  }

  async load() {
    this.at = Date.now();
    this.abort?.abort();
    const abort = new AbortController();
    this.abort = abort;
    try {
      const page = await get(this.path(), { signal: abort.signal });
      if (this.abort === abort) this.show(page);
    } catch (error) {
      // While the gateway is away the bar on top says so already.
      if (error.name !== "AbortError" && error.status > 0) complain(error);
    }
  }

  stop() {
    this.abort?.abort();
    this.abort = null;
    this.at = Infinity;
  }
}
