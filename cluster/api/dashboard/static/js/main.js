// Connects the parts of the page, and updates them with the events of the service.

import { call, callJson } from "./api.js";
import { Charts } from "./charts.js";
import { ControlPanel } from "./control_panel.js";
import { byId, setText } from "./dom.js";
import { follow } from "./events.js";
import { showAudit, showDecisions, showReplicas } from "./lists.js";
import { showChange, showHealth, showNoHealth, showSpeculation } from "./summary.js";
import { startTheme } from "./theme.js";
import { Tiles } from "./tiles.js";
import { askForToken, startTokenDialog, tokenProblem } from "./token.js";
import { startTryIt } from "./try_it.js";

byId("main").hidden = false; // hidden until the scripts have loaded, to avoid layout shifts
const charts = new Charts();
const tiles = new Tiles();
const controlPanel = new ControlPanel();
let lastVersion = null;
let auditEntries = [];
let lastPreviewMs = 0;

startTheme(() => charts.restyle());
startTokenDialog();
startTryIt();
document.addEventListener("visibilitychange", () => charts.draw());
follow((signal) => call("events", { signal }), onEvent, onConnectionState);

function onEvent({ name, data }) {
  if (name === "hello") setText(byId("model"), data.model);
  if (name !== "now") return;
  if (data.figures.length > 0) charts.load(data.figures);
  if (charts.last !== undefined) tiles.show(charts.last);
  showFleet(data.status);
  showNeeded(data.replicas_needed, data.status.replicas);
}

/** Shows the replicas that the objective needs, beside the rules by requests per second. */
function showNeeded(number, replicas) {
  const numReady = replicas.filter(({ report }) => report.is_ready).length;
  const text = number === null ? "" : `Replicas: ${number} needed for the objective, ${numReady} ready`;
  setText(byId("replicas-needed"), text);
}

function showFleet({ replicas, num_lost_replicas: numLost, speculation }) {
  controlPanel.update(speculation);
  showHealth(replicas, charts.last, charts.numRestarts);
  showSpeculation(speculation, replicas, charts.last);
  showChange(speculation, auditEntries[0], replicas);
  showReplicas(replicas, numLost);
  showDecisions(replicas.map(({ report }) => report));
  if (speculation.version !== lastVersion) {
    lastVersion = speculation.version;
    loadAudit();
  }
  if (performance.now() - lastPreviewMs > 2000) {
    lastPreviewMs = performance.now();
    controlPanel.preview();
  }
}

/** Loads the newest page of the audit log or, with a page token, the next older one. */
async function loadAudit(pageToken = "") {
  const page = await callJson(`../v1/admin/audit-log?page_token=${pageToken}`).catch(() => null);
  if (page === null) return;
  auditEntries = pageToken === "" ? page.entries : [...auditEntries, ...page.entries];
  showAudit(auditEntries);
  byId("audit-more").hidden = page.next_page_token === "";
  byId("audit-more").onclick = () => loadAudit(page.next_page_token);
}

async function onConnectionState(state, error) {
  const pill = byId("link");
  if (state === "live") {
    pill.dataset.state = "live";
    setText(pill, "Live");
    return;
  }
  pill.dataset.state = "lost";
  showNoHealth(charts.last?.time_s ?? null);
  if (error?.needsToken) {
    setText(pill, "Token required");
    await askForToken(tokenProblem());
  } else {
    setText(pill, error?.status === 503 ? "Not ready" : "Connection lost");
  }
}
