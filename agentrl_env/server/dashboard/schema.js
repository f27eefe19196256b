// A form from a JSON Schema, and the JSON text of what was filled in.
//
// Everything stays text until it is joined, so that numbers keep their digits. What does not fit the
// schema is sent as it stands: to judge arguments is the environment's part.

import { field, h, select } from "./dom.js";

const DEEPEST = 4; // below, arguments are written as JSON: a type may hold itself

/** Return a form's fields for an object schema: the element, and `text()` for the JSON of its values. */
export function schemaForm(schema) {
  return objectForm(schema, schema, true, 0);
}

/**
 * The fields of an object. Each form has an element, `filled()` for whether anything was entered, and
 * `text()` for its JSON. `demanded` says whether the browser may insist on the required ones: within an
 * object that may be left out it may not.
 */
function objectForm(schema, root, demanded, depth) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, part]) =>
    ({ name, needed: required.has(name), ...partForm(name, plain(part, root), root, required.has(name), demanded, depth) }));
  return {
    element: h("div", {}, rows.map((row) => row.element)),
    filled: () => rows.some((row) => row.filled()),
    text() {
      const given = rows.filter((row) => row.needed || row.filled());
      return `{${given.map((row) => `${JSON.stringify(row.name)}: ${row.text()}`).join(", ")}}`;
    },
  };
}

/** The form of one argument, or of a part of one. */
function partForm(name, kind, root, needed, demanded, depth) {
  const items = kind.type === "array" && kind.items ? plain(kind.items, root) : null;
  const hint = [kind.description?.replace(/\.$/, ""), needed ? "" : "optional", limits(kind)].filter(Boolean).join("; ");
  if (kind.type === "object" && kind.properties && depth < DEEPEST) {
    const form = objectForm(kind, root, demanded && needed, depth + 1);
    return { ...form, element: group(name, hint, form.element) };
  }
  if (items?.type === "object" && items.properties && depth < DEEPEST) return listForm(name, hint, items, root, depth);
  const control = controlFor(kind, needed, needed && demanded);
  return { element: field(name, control, hint), filled: () => control.value !== "", text: () => json(control.value, kind) };
}

/** An array of objects, which grows and shrinks. */
function listForm(name, hint, items, root, depth) {
  const forms = [];
  const list = h("div");
  const add = () => {
    const form = objectForm(items, root, true, depth + 1);
    const remove = h("button", { type: "button", class: "quiet", onclick: () => {
      forms.splice(forms.indexOf(form), 1);
      entry.remove();
    } }, "Remove");
    const entry = group(`${name} ${forms.length + 1}`, "", form.element, remove);
    forms.push(form);
    list.append(entry);
  };
  const button = h("button", { type: "button", class: "quiet", onclick: add }, `Add to ${name}`);
  return {
    element: group(name, hint, list, button),
    filled: () => forms.length > 0,
    text: () => `[${forms.map((form) => form.text()).join(", ")}]`,
  };
}

function group(name, hint, ...parts) {
  return h("fieldset", {}, h("legend", {}, name), hint ? h("small", {}, hint) : null, parts);
}

/** Follow references, and see through "or null". */
function plain(part, root, depth = 0) {
  if (part.$ref && depth < 8) {
    const target = part.$ref.replace(/^#\//, "").split("/").reduce((at, key) => at?.[key], root) ?? {};
    return plain({ ...target, ...part, $ref: undefined }, root, depth + 1);
  }
  const some = (part.anyOf ?? part.oneOf ?? []).filter((branch) => branch.type !== "null");
  if (some.length === 1) {
    return { ...plain(some[0], root, depth + 1), ...part, anyOf: undefined, oneOf: undefined };
  }
  return part.const === undefined ? part : { ...part, enum: [part.const] };
}

function controlFor(kind, needed, insist) {
  const shown = kind.default === undefined || kind.default === null ? null : String(JSON.stringify(kind.default));
  const none = needed ? "choose" : shown === null ? "leave out" : `leave out (${shown})`;
  if (kind.enum) {
    const options = kind.enum.map((value) => [JSON.stringify(value), String(value)]);
    return select([["", none], ...options], "", { required: insist });
  }
  switch (kind.type) {
    case "boolean":
      return select([["", none], ["true", "true"], ["false", "false"]], "", { required: insist });
    case "integer":
    case "number":
      return h("input", { type: "text", inputmode: kind.type === "integer" ? "numeric" : "decimal",
        autocomplete: "off", placeholder: shown, required: insist });
    case "string":
      return h("textarea", { rows: "1", spellcheck: "false", placeholder: shown });
    default:
      return h("textarea", { rows: "3", spellcheck: "false", class: "json", required: insist,
        placeholder: shown ?? (kind.type === "array" ? "[…]" : kind.type === "object" ? "{…}" : "JSON") });
  }
}

function limits({ type, items, minimum, maximum, exclusiveMinimum, exclusiveMaximum, minLength, maxLength }) {
  const words = [type === "array" && items?.type ? `array of ${items.type}` : type ?? "JSON"];
  if (minimum !== undefined) words.push(`at least ${minimum}`);
  if (exclusiveMinimum !== undefined) words.push(`above ${exclusiveMinimum}`);
  if (maximum !== undefined) words.push(`at most ${maximum}`);
  if (exclusiveMaximum !== undefined) words.push(`below ${exclusiveMaximum}`);
  if (minLength !== undefined) words.push(`${minLength} characters or more`);
  if (maxLength !== undefined) words.push(`${maxLength} characters or fewer`);
  return words.join(", ");
}

function json(text, kind) {
  if (kind.type === "string" && !kind.enum) return JSON.stringify(text);
  try {
    JSON.parse(text);
    return text;
  } catch {
    return JSON.stringify(text);
  }
}
