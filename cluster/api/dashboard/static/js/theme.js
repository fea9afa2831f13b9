// Dark or light: as the system says, unless somebody chose otherwise.

import { byId } from "./dom.js";

const KEY = "specdec-theme";
const CHOICES = ["auto", "light", "dark"];

/** Wires the switch; `onChange` is called when colours have changed, by it or by the system. */
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
