"""Build the Grafana dashboard from the panels, on its grid of 24 columns."""

from __future__ import annotations

import json
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.dashboard import Panel as GrafanaPanel

from cluster.observability.metric_definitions import REPLICA_LABEL
from specdec.engine.metrics.metric_definitions import MODEL_LABEL, PREFIX
from tools.monitoring.panel import Panel, Unit
from tools.monitoring.panels import ROWS
from tools.monitoring.queries import Query

UID = "specdec"
_WIDTH, _HEIGHT, _STAT_WIDTH, _STAT_HEIGHT = 6, 8, 4, 4
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_LISTED = f"{PREFIX}num_requests_running"
_ALL = VariableOption(text="All", value="$__all")


def dashboard_json() -> str:
    """Return the dashboard as JSON that Grafana imports."""
    builder = (
        dashboard.Dashboard("specdec")
        .uid(UID)
        .description("Speculative decoding: load, latency, acceptance and decisions of the policy.")
        .tags(["specdec", "llm"])
        .timezone("browser")
        .refresh("10s")
        .time("now-1h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Source").type("prometheus")
        )
        .with_variable(_model_variable())
        .with_variable(_replica_variable())
    )
    for row in ROWS:
        builder = builder.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            builder = builder.with_panel(_panel(panel))
    made = json.loads(json.dumps(builder.build(), cls=JSONEncoder))
    return json.dumps(made, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _model_variable() -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(MODEL_LABEL)
        .label("Model")
        .datasource(_SOURCE)
        .query(f"label_values({_LISTED}, {MODEL_LABEL})")
        .refresh(VariableRefresh.ON_DASHBOARD_LOAD)
    )


def _replica_variable() -> dashboard.QueryVariable:
    """Return the replica filter; "All" also matches replicas that start later."""
    return (
        dashboard.QueryVariable(REPLICA_LABEL)
        .label("Replica")
        .datasource(_SOURCE)
        .query(f'label_values({_LISTED}{{{MODEL_LABEL}="$model_name"}}, {REPLICA_LABEL})')
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(_ALL)
    )


def _panel(panel: Panel) -> Builder[GrafanaPanel]:
    made = _number(panel) if panel.kind == "stat" else _lines(panel)
    for query, ref_id in zip(panel.queries, ascii_uppercase, strict=False):
        made = made.with_target(_target(query, ref_id))
    if panel.most is not None:
        made = made.max(panel.most)
    return made


def _number(panel: Panel) -> stat.Panel:
    return (
        stat.Panel()
        .title(panel.title)
        .description(panel.meaning)
        .datasource(_SOURCE)
        .unit(_grafana_unit(panel.unit))
        .min(0)
        .span(_STAT_WIDTH)
        .height(_STAT_HEIGHT)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def _lines(panel: Panel) -> timeseries.Panel:
    is_stacked = panel.kind == "stacked"
    stacking = common.StackingConfig().mode(
        StackingMode.NORMAL if is_stacked else StackingMode.NONE
    )
    legend = common.VizLegendOptions().placement(LegendPlacement.BOTTOM).show_legend(True)
    return (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.meaning)
        .datasource(_SOURCE)
        .unit(_grafana_unit(panel.unit))
        .min(0)
        .span(_WIDTH)
        .height(_HEIGHT)
        .fill_opacity(30 if is_stacked else 0)
        .stacking(stacking)
        .legend(legend.display_mode(LegendDisplayMode.LIST))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )


def _target(query: Query, ref_id: str) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .ref_id(ref_id)
        .expr(query.expr)
        .legend_format(query.legend)
        .range()
        .datasource(_SOURCE)
    )


def _grafana_unit(unit: Unit) -> str:
    """Return Grafana's name of a unit, or a suffix for a unit that Grafana does not have."""
    return f"suffix: {unit}" if unit in ("tokens/s", "steps/s", "x") else unit
