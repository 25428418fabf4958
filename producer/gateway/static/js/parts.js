// Parts of pages that update in place: tables that may be empty, badges, bars.
import { card, h, keyedList, setText, table } from "./dom.js";
import { toneOf } from "./format.js";

/** A card with a table that says what to do while it is empty.

    On a narrow screen each row becomes a block of names and values (`is-stacking`), so
    cells know their column's name, and roles say what they are whatever the styles do.
 */
export function listing({ title, label, columns, keyOf, row, none, stacks = true }) {
  const { wrap, body } = table(label, columns, { class: stacks ? "is-stacking" : null });
  const { node, note } = card(title, none, wrap);
  const update = keyedList(body, keyOf, (item) => {
    const made = row(item);
    made.node.setAttribute("role", "row");
    [...made.node.children].forEach((cell, at) => {
      cell.dataset.column = columns[at][0];
      cell.setAttribute("role", cell.tagName === "TH" ? "rowheader" : "cell");
    });
    return made;
  });
  wrap.hidden = true;
  return {
    node,
    note,
    set(items) {
      update(items);
      none.hidden = items.length > 0;
      wrap.hidden = items.length === 0;
    },
  };
}

export function stateBadge() {
  const node = h("span", { class: "state" });
  return {
    node,
    set(state) {
      setText(node, state);
      node.dataset.tone = toneOf(state);
    },
  };
}

/** A bar of parts, each `[class, amount]` of the same whole. */
export function bar(...classes) {
  const parts = classes.map((name) => h("i", { class: name }));
  const node = h("div", { class: "bar", role: "img", "aria-label": "nothing yet" }, ...parts);
  return {
    node,
    set(whole, ...amounts) {
      amounts.forEach((amount, index) => {
        parts[index].style.width = `${whole > 0 ? (100 * amount) / whole : 0}%`;
      });
    },
  };
}
