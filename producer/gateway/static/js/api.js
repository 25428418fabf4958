// Calls to the gateway. An error has the gateway's own words.

export class ApiProblem extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export async function get(path, options = {}) {
  return await call(path, { method: "GET", ...options });
}

export async function post(path, body, options = {}) {
  return await call(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body ?? {}),
    ...options,
  });
}

async function call(path, options) {
  const response = await request(path, options);
  return response.status === 204 ? null : await response.json();
}

/** The response itself, for bodies that are read as they come. */
export async function request(path, options) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiProblem(0, "The gateway does not answer.", "unreachable");
  }
  if (response.ok) return response;
  const problem = await problemOf(response);
  if (response.status === 401 && location.pathname !== "/login") toLogin();
  throw problem;
}

async function problemOf(response) {
  let message = `The gateway answered ${response.status}.`;
  let code = null;
  try {
    const { error } = await response.json();
    message = error.message ?? message;
    code = error.code ?? null;
  } catch {
    // Not the gateway's form: something between us and it answered.
  }
  return new ApiProblem(response.status, message, code);
}

export function toLogin() {
  const here = location.pathname + location.search;
  location.assign(`/login?next=${encodeURIComponent(here)}`);
}

/** Events of a response body in the form of server-sent events, as they come. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).replace(/\r\n?/g, "\n").split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const event = { name: "message", data: "" };
        for (const line of block.split("\n")) {
          if (line.startsWith("data:")) event.data += line.slice(5).trimStart();
          else if (line.startsWith("event:")) event.name = line.slice(6).trim();
        }
        if (event.data !== "") yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export const jobPath = (id) => id.split("/").map(encodeURIComponent).join("/");
