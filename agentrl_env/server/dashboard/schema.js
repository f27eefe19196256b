// A form from a JSON Schema, and the JSON text of what was filled in.
//
// Everything stays text until it is joined, so that numbers keep their digits. What does not fit the
// schema is sent as it stands: to judge arguments is the environment's part.

import { field, h, select } from "./dom.js";

/** Return a form's fields for an object schema: the element, and `text()` for the JSON of its values. */
export function schemaForm(schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, part]) => {
    const kind = plain(part, schema);
    const control = controlFor(kind, required.has(name));
    const needed = required.has(name);
    const hint = [kind.description, needed ? "" : "optional", limits(kind)].filter(Boolean).join("; ");
    return { name, control, kind, needed, element: field(name, control, hint) };
  });
  return {
    element: h("div", {}, rows.map((row) => row.element)),
    text() {
      const given = rows.filter(({ control, needed }) => needed || control.value !== "");
      return `{${given.map((row) => `${JSON.stringify(row.name)}: ${json(row.control.value, row.kind)}`).join(", ")}}`;
    },
  };
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

function controlFor(kind, needed) {
  const shown = kind.default === undefined || kind.default === null ? null : String(JSON.stringify(kind.default));
  const none = needed ? "choose" : shown === null ? "leave out" : `leave out (${shown})`;
  if (kind.enum) {
    const options = kind.enum.map((value) => [JSON.stringify(value), String(value)]);
    return select([["", none], ...options], "", { required: needed });
  }
  switch (kind.type) {
    case "boolean":
      return select([["", none], ["true", "true"], ["false", "false"]], "", { required: needed });
    case "integer":
    case "number":
      return h("input", { type: "text", inputmode: kind.type === "integer" ? "numeric" : "decimal",
        autocomplete: "off", placeholder: shown, required: needed });
    case "string":
      return h("textarea", { rows: "1", spellcheck: "false", placeholder: shown });
    default:
      return h("textarea", { rows: "3", spellcheck: "false", class: "json", required: needed,
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
