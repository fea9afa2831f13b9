// The light or dark theme: that of the system, unless the user selects one.

import { byId } from "./dom.js";

const KEY = "specdec-theme";
const CHOICES = ["auto", "light", "dark"];

/** Initializes the button; `onChange` is called when the user or the system changes the theme. */
export function startTheme(onChange) {
  const button = byId("theme");
  let chosen = CHOICES.includes(localStorage.getItem(KEY)) ? localStorage.getItem(KEY) : "auto";
  const show = () => {
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    button.textContent = `Theme: ${chosen}`;
  };
  show();
  button.addEventListener("click", () => {
    chosen = CHOICES[(CHOICES.indexOf(chosen) + 1) % CHOICES.length];
    localStorage.setItem(KEY, chosen);
    show();
    onChange();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
}
