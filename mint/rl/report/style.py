"""The look of a report: one style sheet, light and dark by the reader's own setting."""

STYLE = """
:root { color-scheme: light dark; --paper:#fff; --card:#f6f7f9; --ink:#1c2430; --soft:#667085; --rule:#dfe3e8;
  --up:22,140,80; --down:205,55,55; --alarm:#c9302c; --warning:#b7791f; --notice:#3b6fb6;
  --c0:#2563eb; --c1:#d9730d; --c2:#0f9d78; --c3:#8b5cf6; }
@media (prefers-color-scheme: dark) { :root { --paper:#12161d; --card:#1a2029; --ink:#e6e9ee; --soft:#98a2b3;
  --rule:#2b3340; --up:46,175,110; --down:225,85,85; --alarm:#ff6b66; --warning:#e0a53d; --notice:#7aa7e6;
  --c0:#6ea0ff; --c1:#ff9d4d; --c2:#3fcaa0; --c3:#b79cff; } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1180px; padding: 28px 24px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif }
h1 { margin: 0 0 4px; font-size: 26px } h2 { margin: 36px 0 12px; font-size: 19px } h3 { margin: 22px 0 8px }
h1 + p, small, .tick, figcaption .legend { color: var(--soft) } small { font-weight: 400; font-size: 13px }
nav { display: flex; gap: 16px; flex-wrap: wrap; margin: 14px 0; } a { color: var(--c0) }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; margin: 18px 0 }
.tiles div, figure, article { background: var(--card); border: 1px solid var(--rule); border-radius: 8px }
.tiles div { padding: 10px 12px } dt { color: var(--soft); font-size: 12.5px } dd { margin: 2px 0 0; font-weight: 600;
  overflow-wrap: anywhere }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: 14px }
figure { margin: 0; padding: 10px 12px 6px } svg { width: 100%; height: auto; display: block }
figcaption { display: flex; justify-content: space-between; gap: 12px; font-weight: 600; margin-bottom: 4px }
.legend { font-weight: 400; font-size: 12.5px; display: flex; gap: 12px; flex-wrap: wrap }
.key::before { content: ""; display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 5px;
  vertical-align: middle; background: var(--key) }
.key.c0 { --key: var(--c0) } .key.c1 { --key: var(--c1) } .key.c2 { --key: var(--c2) } .key.c3 { --key: var(--c3) }
.grid { stroke: var(--rule); stroke-width: 1 } .tick { fill: var(--soft); font-size: 11px }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round } .strip { fill: transparent }
.strip:hover { fill: var(--soft); fill-opacity: .13 }
.c0 { stroke: var(--c0) } .c1 { stroke: var(--c1) } .c2 { stroke: var(--c2) } .c3 { stroke: var(--c3) }
.dot.c0 { fill: var(--c0) } .dot.c1 { fill: var(--c1) } .dot.c2 { fill: var(--c2) } .dot.c3 { fill: var(--c3) }
.mark { stroke-width: 1.5 } .mark.alarm { stroke: var(--alarm) } .mark.warning { stroke: var(--warning) }
.mark.alarm, .mark.warning { stroke-dasharray: 4 3 } .mark.checkpoint { stroke: var(--soft) }
article { padding: 10px 14px; margin: 10px 0 } article header { margin-bottom: 6px }
.finding { border-left: 4px solid var(--notice) } .finding.alarm { border-left-color: var(--alarm) }
.finding.warning { border-left-color: var(--warning) } .finding header b { text-transform: uppercase; font-size: 12px;
  letter-spacing: .04em } .alarm header b { color: var(--alarm) } .warning header b { color: var(--warning) }
.finding p { margin: 4px 0 } .figures span { margin-right: 14px; color: var(--soft) } .figures b { color: var(--ink) }
.remedy::before { content: "→ "; color: var(--soft) }
pre { margin: 6px 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.7 ui-monospace, "SF Mono", Menlo,
  Consolas, monospace } .prompt { color: var(--soft) }
.evidence { border-left: 2px solid var(--rule); padding-left: 10px }
.answer span { border-radius: 3px; padding: 1px 0; box-decoration-break: clone }
.answer .up { background: rgba(var(--up), calc(.12 + .5 * var(--d))) }
.answer .down { background: rgba(var(--down), calc(.12 + .5 * var(--d))) }
.answer span[style="--d:0.00"] { background: none } .answer span:hover { outline: 1px solid var(--soft) }
.answer i { color: var(--soft) } .best { color: rgb(var(--up)) } .worst { color: rgb(var(--down)) }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-size: 13px } th { text-align: left }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top }
td { overflow-wrap: anywhere; min-width: 4.5em } td:first-child { white-space: nowrap }
details summary { cursor: pointer; color: var(--c0); margin-bottom: 8px } .bar { display: flex; height: 10px; gap: 2px;
  border-radius: 5px; overflow: hidden; margin: 8px 0 14px } .bar .solved { background: rgb(var(--up)) }
.bar .learning { background: var(--c0) } .bar .dead { background: rgb(var(--down)) }
.scale { color: var(--soft); font-size: 13px } .scale span { padding: 0 6px; border-radius: 3px; color: var(--ink) }
@media print { nav { display: none } body { max-width: none } }
"""
