// Try the models: a conversation or plain text, streamed, with the figures of each answer.
import { get } from "../api.js";
import { empty, h, setText } from "../dom.js";
import { complain } from "../notices.js";
import { Answer } from "./answer.js";
import { makeSettings } from "./playground_settings.js";

export function playground({ me }) {
  const settings = makeSettings();
  const talk = h("div", { class: "talk", tabindex: "0", role: "region", "aria-label": "Conversation" });
  const hint = empty("Ask something.", "Enter sends, Shift and Enter begin a line.");
  const prompt = h("textarea", { id: "prompt", rows: "3", "aria-describedby": "composer-note" });
  const label = h("label", { for: "prompt", class: "visually-hidden" }, "Your message");
  const send = h("button", { class: "button primary", type: "submit" }, "Send");
  const stop = h("button", { class: "button", type: "button", disabled: true }, "Stop");
  const clear = h("button", { class: "button", type: "button" }, "Clear");
  const state = { turns: [], answer: null };
  const mayAsk = me.is_admin || me.scopes.includes("inference");
  send.disabled = !mayAsk;
  talk.append(hint);

  const form = h("form", { class: "composer" }, label, prompt,
    h("div", { class: "composer-foot" }, settings.mode,
      h("span", { class: "note", id: "composer-note" },
        mayAsk ? "" : "This key may look and not ask: that needs the scope inference."),
      h("div", { class: "end" }, clear, stop, send)));

  const showMode = () => {
    const isChat = settings.isChat();
    setText(label, isChat ? "Your message" : "Text to go on from");
    prompt.placeholder = isChat ? "Message" : "Text to go on from";
  };
  settings.onMode(() => {
    showMode();
    reset();
  });

  function reset() {
    state.answer?.stop();
    state.turns = [];
    talk.replaceChildren(hint);
  }

  async function submit() {
    const text = prompt.value;
    if (state.answer !== null || !mayAsk || text.trim() === "") {
      prompt.focus();
      return;
    }
    const model = settings.model();
    if (model === "") {
      complain(new Error("No model is served now. Start a worker: tokenmill work"));
      return;
    }
    hint.remove();
    prompt.value = "";
    const turn = addTurn(talk, "user", settings.isChat() ? "You" : "Text");
    turn.said.textContent = text;
    const reply = addTurn(talk, "assistant", model);
    talk.scrollTop = talk.scrollHeight;
    state.turns.push({ role: "user", content: text });
    state.answer = new Answer(reply, talk);
    send.disabled = true;
    stop.disabled = false;
    try {
      const said = await state.answer.run(settings.request(state.turns, text));
      if (said === "") {
        // It had no answer: to be sent again, or changed, without typing it anew.
        state.turns.pop();
        if (prompt.value === "") prompt.value = text;
      } else state.turns.push({ role: "assistant", content: said });
    } finally {
      state.answer = null;
      send.disabled = false;
      stop.disabled = true;
    }
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  stop.addEventListener("click", () => {
    state.answer?.stop();
    prompt.focus();
  });
  clear.addEventListener("click", () => {
    reset();
    prompt.focus();
  });
  get("/v1/admin/me").then(({ models }) => settings.setModels(models)).catch(complain);
  showMode();
  const node = h("div", { class: "view" },
    h("div", { class: "view-head" }, h("h1", {}, "Playground")),
    h("div", { class: "playground" },
      h("section", { class: "card", "aria-label": "Conversation and message" }, talk, form),
      settings.node));
  return { title: "Playground", node, leave: () => state.answer?.stop() };
}

function addTurn(talk, role, name) {
  const said = h("div", { class: "said" });
  const figures = role === "assistant" ? h("p", { class: "note figures", role: "status" }) : null;
  const node = h("div", { class: "turn", "data-role": role },
    h("span", { class: "role" }, name), said, figures);
  talk.append(node);
  return { node, said, figures };
}
