// The button that goes round: as the system, light, dark.
import { svg } from "./dom.js";

const KEY = "tokenmill-theme";
const ORDER = ["system", "light", "dark"];
const WORDS = { system: "as the system", light: "light", dark: "dark" };
const SHAPES = {
  system: "M2 3h12v8H2zM6 14h4",
  light:
    "M8 5a3 3 0 1 0 0 6 3 3 0 1 0 0-6M8 1v1.500M8 13.500V15M1 8h1.500M13.500 8H15" +
    "M3 3l1 1M12 12l1 1M3 13l1-1M12 4l1-1",
  dark: "M13.500 9.500A6 6 0 0 1 6.500 2.500a6 6 0 1 0 7 7z",
};

export function setUpTheme(button) {
  const root = document.documentElement;
  const show = () => {
    const theme = root.dataset.theme ?? "system";
    const label = `Theme: ${WORDS[theme]}`;
    button.setAttribute("aria-label", label);
    button.title = label;
    button.replaceChildren(
      svg("svg", {
        viewBox: "0 0 16 16", fill: "none", stroke: "currentColor",
        "stroke-width": "1.5", "stroke-linecap": "round", "stroke-linejoin": "round",
        "aria-hidden": "true",
      }, svg("path", { d: SHAPES[theme] })),
    );
  };
  button.addEventListener("click", () => {
    const now = root.dataset.theme ?? "system";
    const next = ORDER[(ORDER.indexOf(now) + 1) % ORDER.length];
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // Storage is blocked: the choice holds until the page is left.
    }
    show();
  });
  show();
}
