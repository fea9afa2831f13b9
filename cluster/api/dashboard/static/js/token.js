// Asks for the admin token where the service wants one.

import { setToken, token } from "./api.js";
import { byId, say } from "./dom.js";

/** Wires the dialog's buttons. */
export function startTokenDialog() {
  byId("token-open").addEventListener("click", () => askForToken(""));
  byId("token-cancel").addEventListener("click", () => byId("token-dialog").close("cancelled"));
}

let asking = null;

/**
 * Resolves when somebody has given a token or has closed the dialog. Asked twice, it is shown once.
 * @param {string} problem what is wrong with the token that was given before
 * @returns {Promise<boolean>} whether there is a new token
 */
export function askForToken(problem) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("token-dialog");
    byId("token-open").hidden = false;
    byId("token").value = "";
    say(byId("token-error"), problem);
    dialog.returnValue = "";
    dialog.addEventListener(
      "close",
      () => {
        asking = null;
        const given = byId("token").value.trim();
        byId("token").value = "";
        const isGiven = dialog.returnValue === "given" && given !== "";
        if (isGiven) setToken(given);
        resolve(isGiven);
      },
      { once: true },
    );
    dialog.showModal();
  });
  return asking;
}

/** What to say to a 401: that a token is needed, or that the one given is wrong. */
export function tokenProblem() {
  return token() === "" ? "" : "That token is not the right one.";
}
