// The page's own way to make elements: text is always text, never markup.

/** The element of this id, which index.html has. */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`index.html has no #${id}`);
  return found;
}

/**
 * Makes an element. Attributes that are null or false are left out; children may be texts.
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

/** An SVG element, for the few marks that the page draws itself. */
export function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** Sets a text only where it differs, so that screen readers are not told the same twice. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
