// Passing messages, and the question before something that cannot be undone.
import { h } from "./dom.js";

const STAY_MS = 8000;

export function notify(text, tone = "good") {
  const place = document.getElementById("toasts");
  const close = h("button", { class: "button small", type: "button" }, "Close");
  const toast = h("div", { class: "toast", "data-tone": tone }, h("span", {}, text), close);
  const remove = () => toast.remove();
  close.addEventListener("click", remove);
  place.append(toast);
  while (place.children.length > 3) place.firstElementChild.remove();
  setTimeout(remove, STAY_MS);
}

export const complain = (error) => notify(error.message, "bad");

/** Asks, and resolves to whether the answer was yes. Focus is on the harmless answer. */
export function confirmed(title, text, yes, no = "Keep") {
  const dialog = document.getElementById("confirm");
  const before = document.activeElement;
  document.getElementById("confirm-title").textContent = title;
  document.getElementById("confirm-text").textContent = text;
  document.getElementById("confirm-yes").textContent = yes;
  document.getElementById("confirm-no").textContent = no;
  dialog.returnValue = "no";
  dialog.showModal();
  document.getElementById("confirm-no").focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      before?.focus();
      resolve(dialog.returnValue === "yes");
    }, { once: true });
  });
}

/** Runs what a button does, once at a time, and says how it went wrong.

    The button is not disabled meanwhile: it would lose the focus, and a dialog that
    closes could not give it back.
 */
export function acting(button, action) {
  button.addEventListener("click", async () => {
    if (button.getAttribute("aria-busy") === "true") return;
    button.setAttribute("aria-busy", "true");
    try {
      await action();
    } catch (error) {
      complain(error);
    } finally {
      button.setAttribute("aria-busy", "false");
    }
  });
  return button;
}
