// Asks for the admin token if the service requires one.

import { setToken, token } from "./api.js";
import { byId, setText } from "./dom.js";

/** Initializes the buttons of the dialog. */
export function startTokenDialog() {
  byId("token-open").addEventListener("click", () => askForToken(""));
  byId("token-cancel").addEventListener("click", () => byId("token-dialog").close("cancelled"));
}

let pending = null;

/**
 * Shows the dialog, and resolves when it is closed. Concurrent calls share one dialog.
 * @param {string} problem the error of the previous token, or empty
 * @returns {Promise<boolean>} whether a new token was entered
 */
export function askForToken(problem) {
  pending ??= new Promise((resolve) => {
    const dialog = byId("token-dialog");
    byId("token-open").hidden = false;
    byId("token").value = "";
    setText(byId("token-error"), problem);
    dialog.returnValue = "";
    dialog.addEventListener(
      "close",
      () => {
        pending = null;
        const entered = byId("token").value.trim();
        byId("token").value = "";
        const isEntered = dialog.returnValue === "submitted" && entered !== "";
        if (isEntered) setToken(entered);
        resolve(isEntered);
      },
      { once: true },
    );
    dialog.showModal();
  });
  return pending;
}

/** Returns the error text for a 401 response; empty if no token was sent. */
export function tokenProblem() {
  return token() === "" ? "" : "The service rejected this token.";
}
