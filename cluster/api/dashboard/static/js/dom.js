// Creates and updates elements. Strings become text nodes, never markup.

/** Returns the element with this id. Throws if index.html has none. */
export function byId(id) {
  const element = document.getElementById(id);
  if (element === null) throw new Error(`index.html has no #${id}`);
  return element;
}

/**
 * Creates an element. Attributes that are null, undefined or false are omitted.
 * @param {string} tag
 * @param {Record<string, unknown>} attributes
 * @param {...(Node | string | number)} children
 */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

/** Creates an SVG element. */
export function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** Sets the text if it differs, so that screen readers do not announce the same text again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
