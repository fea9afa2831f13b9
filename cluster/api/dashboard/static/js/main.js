// Joins the parts of the page, and feeds them with what the service tells each second.

import { call, callJson } from "./api.js";
import { Charts } from "./charts.js";
import { byId, say } from "./dom.js";
import { follow } from "./events.js";
import { showAudit, showDecisions, showReplicas } from "./lists.js";
import { Steer } from "./steer.js";
import { startTheme } from "./theme.js";
import { Tiles } from "./tiles.js";
import { askForToken, startTokenDialog, tokenProblem } from "./token.js";
import { startTryIt } from "./try_it.js";

byId("main").hidden = false; // not before its parts can be made: nothing shall move once it is seen
const charts = new Charts();
const tiles = new Tiles();
const steer = new Steer();
let lastVersion = null;
let auditEntries = [];
let lastPreviewMs = 0;

startTheme(() => charts.restyle());
startTokenDialog();
startTryIt();
document.addEventListener("visibilitychange", () => charts.draw());
follow((signal) => call("events", { signal }), onEvent, onLink);

function onEvent({ name, data }) {
  if (name === "hello") say(byId("model"), data.model);
  if (name !== "now") return;
  if (data.figures.length > 0) {
    charts.load(data.figures);
    tiles.show(data.figures.at(-1));
  }
  showFleet(data.status);
}

function showFleet({ replicas, num_lost_replicas: numLost, speculation }) {
  steer.update(speculation);
  steer.showDecisions(replicas.map((each) => each.report));
  showReplicas(replicas, numLost);
  showDecisions(decisionsOf(replicas), replicas.length > 1);
  if (speculation.version !== lastVersion) {
    lastVersion = speculation.version;
    loadAudit();
  }
  if (performance.now() - lastPreviewMs > 2000) {
    lastPreviewMs = performance.now();
    steer.preview();
  }
}

/** Of all replicas, the latest first. */
function decisionsOf(replicas) {
  const all = replicas.flatMap(({ report }) =>
    report.decision_changes.map((change) => ({ ...change, replica_id: report.replica_id })),
  );
  return all.sort((one, other) => Date.parse(other.at) - Date.parse(one.at)).slice(0, 100);
}

/** The newest changes, or with a token those before the ones that are shown. */
async function loadAudit(pageToken = "") {
  const page = await callJson(`../v1/admin/audit-log?page_token=${pageToken}`).catch(() => null);
  if (page === null) return;
  auditEntries = pageToken === "" ? page.entries : [...auditEntries, ...page.entries];
  showAudit(auditEntries);
  byId("audit-more").hidden = page.next_page_token === "";
  byId("audit-more").onclick = () => loadAudit(page.next_page_token);
}

async function onLink(state, error) {
  const pill = byId("link");
  if (state === "live") {
    pill.dataset.state = "live";
    say(pill, "Live");
    return;
  }
  pill.dataset.state = "lost";
  if (error?.needsToken) {
    say(pill, "Token needed");
    await askForToken(tokenProblem());
  } else {
    say(pill, error?.status === 503 ? "Service not ready, trying again" : "Connection lost, trying again");
  }
}
