// Elements from plain values. Text only ever becomes a text node: nothing that a server, a task or a
// model wrote is read as HTML.

/** Make an element: `on...` props are listeners, true/false props are flags, the others attributes. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** Show items as rows of a table body; a row whose item is still there stays the same element. */
export function reconcile(body, items, key, cells) {
  const old = new Map([...body.children].map((row) => [row.dataset.key, row]));
  const rows = items.map((item) => {
    const id = key(item);
    const row = old.get(id) ?? h("tr", { "data-key": id });
    const next = cells(item);
    if (row.children.length !== next.length) row.replaceChildren(...next);
    else next.forEach((cell, n) => row.children[n].isEqualNode(cell) || row.children[n].replaceWith(cell));
    return row;
  });
  rows.forEach((row, n) => body.children[n] === row || body.insertBefore(row, body.children[n] ?? null));
  while (body.children.length > rows.length) body.lastElementChild.remove();
}

/** A table that scrolls sideways where it does not fit; columns are [heading, class] pairs. */
export function table(label, columns) {
  const body = h("tbody");
  const heads = columns.map(([name, kind]) => h("th", { scope: "col", class: kind }, name));
  const element = h("table", { "aria-label": label }, h("thead", {}, h("tr", {}, heads)), body);
  const frame = h("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" }, element);
  return { element: frame, body };
}

/** A labelled control. */
export function field(label, control, hint) {
  control.id ||= `field-${++fields}`;
  const parts = [h("label", { for: control.id }, label), control];
  if (hint) {
    parts.push(h("small", { id: `${control.id}-hint` }, hint));
    control.setAttribute("aria-describedby", `${control.id}-hint`);
  }
  return h("div", { class: "field" }, parts);
}
let fields = 0;

/** A select with [value, text] options. */
export function select(options, value, props = {}) {
  const element = h("select", props);
  fill(element, options, value);
  return element;
}

/** Give a select other options. */
export function fill(element, options, value) {
  element.replaceChildren(...options.map(([v, text]) => h("option", { value: v }, text)));
  element.value = value;
}

/** A session's status, in words and colour. */
export function badge(status) {
  return h("span", { class: `badge ${status}` }, status.replaceAll("_", " "));
}

/** The first cell of a session's row: a link to it by the end of its id. */
export function sessionLink({ session_id: id }) {
  return h("th", { scope: "row" },
    h("a", { href: `#/session/${encodeURIComponent(id)}`, title: id }, id.split(".").at(-1).slice(0, 10)));
}

/** Seconds, for people. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d`;
}

/** A number without the noise of binary fractions. */
export function number(value) {
  return value === null ? "not a number" : String(Number(value.toPrecision(6)));
}

/** "1 turn", "2 turns". */
export function count(n, word) {
  return `${n} ${word}${n === 1 ? "" : "s"}`;
}
