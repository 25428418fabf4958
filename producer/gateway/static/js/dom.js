// Building and updating elements. Text goes in as text alone: there is no way here to
// make markup of a string, and the page's policy (Trusted Types) forbids it too.
const SVG = "http://www.w3.org/2000/svg";

/** An element: `h("td", { class: "number", onclick: f }, "text", child)`. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Sets an element's text if it differs, so that selections and readers rest. */
export function setText(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

export function setAttribute(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Keeps a parent's children in step with a list, and each child with its key.

    `create(item)` returns `{ node, update }`; a node lives as long as its key does, so
    focus and selection inside it survive updates.
 */
export function keyedList(parent, keyOf, create) {
  const rows = new Map();
  return (items) => {
    const seen = new Set();
    let place = parent.firstElementChild;
    for (const item of items) {
      const key = keyOf(item);
      if (seen.has(key)) continue;
      seen.add(key);
      let row = rows.get(key);
      if (row === undefined) {
        row = create(item);
        rows.set(key, row);
      }
      row.update(item);
      if (row.node === place) place = place.nextElementSibling;
      else parent.insertBefore(row.node, place);
    }
    for (const [key, row] of rows) {
      if (!seen.has(key)) {
        row.node.remove();
        rows.delete(key);
      }
    }
  };
}

/** A table in a card-wide frame that scrolls in itself. `columns`: name and class. */
export function table(label, columns, attributes = {}) {
  const heads = columns.map(([name, kind]) =>
    h("th", { scope: "col", role: "columnheader", class: kind ?? null },
      name || h("span", { class: "visually-hidden" }, "Actions")));
  const body = h("tbody", { role: "rowgroup" });
  const wrap = h("div", { class: "table-wrap", tabindex: "0", role: "region",
    "aria-label": label },
  h("table", { role: "table", ...attributes },
    h("caption", { class: "visually-hidden" }, label),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ...heads)), body));
  return { wrap, body };
}

export function card(title, ...children) {
  const note = h("span", { class: "note end" });
  const head = h("div", { class: "card-head" }, h("h2", {}, title), note);
  return { node: h("section", { class: "card" }, head, ...children), note, head };
}

/** What stands where there is nothing yet, and what to do about it. */
export function empty(title, ...how) {
  return h("div", { class: "empty" }, h("strong", {}, title), ...how);
}

export function command(text) {
  return h("code", {}, text);
}
