// The playground's settings, and the request that they make.
import { h } from "../dom.js";

const FIELDS = [
  ["max_tokens", "Most tokens", "256", { min: "1", max: "100000", step: "1" }],
  ["temperature", "Temperature", "0", { min: "0", max: "5", step: "0.1" }],
  ["top_p", "Top-p", "1", { min: "0.01", max: "1", step: "0.01" }],
  ["seed", "Seed", "", { min: "0", step: "1", placeholder: "random" }],
];

export function makeSettings() {
  const model = h("select", { id: "model" });
  const inputs = new Map(FIELDS.map(([name, , value, limits]) => [name, h("input", {
    id: `field-${name}`, type: "number", inputmode: "decimal", value, ...limits,
  })]));
  const stops = h("input", { id: "field-stop", type: "text", placeholder: "none", autocomplete: "off" });
  const mode = makeMode();
  const field = (id, name, input) =>
    h("div", { class: "field" }, h("label", { for: id }, name), input);
  const node = h("section", { class: "card settings", "aria-label": "Settings" },
    field("model", "Model", model),
    h("div", { class: "pair-fields" }, ...FIELDS.map(([name, title]) =>
      field(`field-${name}`, title, inputs.get(name)))),
    field("field-stop", "Stop at", stops),
    h("p", { class: "note" }, "The job runs as yours, of class interactive. Stop cancels it."));

  function sampling() {
    const values = {};
    for (const [name, input] of inputs) {
      if (input.value !== "") values[name] = Number(input.value);
    }
    if (stops.value !== "") values.stop = [stops.value];
    return values;
  }

  return {
    node,
    mode: mode.node,
    isChat: mode.isChat,
    onMode: mode.onChange,
    model: () => model.value,
    setModels(models) {
      model.replaceChildren(...models.map((one) =>
        h("option", { value: one.name }, one.is_served ? one.name : `${one.name} (no worker)`)));
      const first = models.find((one) => one.is_served) ?? models[0];
      if (first !== undefined) {
        model.value = first.name;
        mode.set(first.has_chat_template);
      }
    },
    /** Where to send what, for a conversation or a text. */
    request(turns, text) {
      const shared = {
        model: model.value, stream: true, stream_options: { include_usage: true }, ...sampling(),
      };
      return mode.isChat()
        ? { path: "/v1/chat/completions", body: { ...shared, messages: turns } }
        : { path: "/v1/completions", body: { ...shared, prompt: text } };
    },
  };
}

function makeMode() {
  const options = ["Chat", "Text"].map((name) => h("input", {
    type: "radio", name: "mode", value: name, checked: name === "Chat",
  }));
  const listeners = [];
  const node = h("div", { class: "segments", role: "radiogroup", "aria-label": "Kind of request" },
    ...options.map((input) => h("label", {}, input, input.value)));
  node.addEventListener("change", () => listeners.forEach((listener) => listener()));
  return {
    node,
    isChat: () => options[0].checked,
    onChange: (listener) => listeners.push(listener),
    set(isChat) {
      options[isChat ? 0 : 1].checked = true;
      listeners.forEach((listener) => listener());
    },
  };
}
