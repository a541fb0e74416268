"""The page's looks: light and dark by the reader's system, readable at 900 pixels, and printed in light colours."""

from __future__ import annotations

_LIGHT = """--page:#fff;--text:#1c1f23;--soft:#59626d;--line:#d5dae0;--card:#f6f7f9;--wrong:#b0431a;--right:#14706b;--unsure:#7a5d00;
--on:#101214;
--gate:#f2b85c;--up:#8cc8ee;--pad:#e4e7eb;--row:#cfd6de;--lost:#b5179e;
--l0:#e9edf1;--l1:#fde3b6;--l2:#fbc47a;--l3:#f59a3e;--l4:#dd6b18;--l5:#a8430d;--l6:#5f2407;"""
_DARK = """--page:#14171b;--text:#e4e7eb;--soft:#9aa4b0;--line:#363d46;--card:#1d2228;--wrong:#f08a5b;--right:#4fc3b8;--unsure:#e0b93f;
--on:#101214;
--gate:#d99c3f;--up:#6aaedb;--pad:#59626d;--row:#98a3af;--lost:#f06be0;
--l0:#2b3138;--l1:#5a3c17;--l2:#86541a;--l3:#b86f1f;--l4:#e58d34;--l5:#f7b56a;--l6:#fde3b6;"""
# Places are told apart by eight colours from dark to bright (cividis); the same on both.
_ROWS = "--r0:#00204d;--r1:#1d3b6d;--r2:#45526c;--r3:#666970;--r4:#848279;--r5:#a59c74;--r6:#cab969;--r7:#ffea46;"

STYLE = f"""
:root{{color-scheme:light dark;{_LIGHT}{_ROWS}}}
@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
@media print{{:root{{color-scheme:light;{_LIGHT}}} body{{max-width:none;padding:0}} .finding,figure,.call header{{break-inside:avoid}}}}
*{{box-sizing:border-box;-webkit-print-color-adjust:exact;print-color-adjust:exact}}
body{{margin:0 auto;max-width:900px;padding:24px 28px 60px;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,"Segoe UI","DejaVu Sans",sans-serif;
overflow-wrap:anywhere}}
h1{{font-size:22px;margin:0 0 4px}} h2{{font-size:19px;margin:32px 0 8px}} 
h3{{font-size:16px;margin:26px 0 8px}} h4{{font-size:15px;margin:0}}
p{{margin:6px 0}} code,pre{{font:13px/1.5 ui-monospace,"DejaVu Sans Mono",monospace}}
pre{{background:var(--card);border:1px solid var(--line);border-radius:5px;padding:10px 12px;white-space:pre-wrap;margin:6px 0 12px}}
.soft,figcaption,dt{{color:var(--soft)}} .small{{font-size:13px}}
.verdict{{display:inline-block;font-weight:700;border:2px solid currentColor;border-radius:5px;padding:0 9px;margin-right:8px}}
.right{{color:var(--right)}} .wrong{{color:var(--wrong)}} .unsure{{color:var(--unsure)}}
.summary{{font-size:17px}}
.finding{{border-left:4px solid var(--wrong);background:var(--card);border-radius:0 6px 6px 0;padding:10px 16px;margin:12px 0}}
.strength{{font-size:13px;font-weight:600;border:1px solid var(--soft);border-radius:4px;padding:0 6px;margin-left:6px;white-space:nowrap}}
dl{{display:grid;grid-template-columns:max-content 1fr;gap:3px 16px;margin:8px 0}} dt{{font-weight:500}} dd{{margin:0}}
table{{border-collapse:collapse;width:100%;font-size:14px}}
td,th{{text-align:left;vertical-align:top;padding:5px 14px 5px 0;border-bottom:1px solid var(--line)}}
th{{font-weight:500;color:var(--soft)}} a{{color:inherit}}
th:first-child{{width:38%}} th:nth-child(2){{width:15%}} details{{margin:6px 0}} summary{{cursor:pointer;color:var(--soft)}}
.operands{{display:grid;grid-template-columns:repeat(auto-fit,minmax(100px,1fr));gap:8px;padding:0;margin:8px 0;list-style:none}}
.operands li{{border:1px solid var(--line);border-top:5px solid var(--soft);border-radius:5px;
padding:5px 10px;font-size:14px}}
.operands li.equal{{border-top-color:var(--right)}} .operands li.different{{border-top-color:var(--wrong)}}
.operands b{{display:block;font-weight:500}}
figure{{margin:20px 0}} figcaption{{font-size:14px;margin-top:4px}} svg{{width:100%;height:auto;display:block}}
svg text{{fill:var(--text);font:12px system-ui,"DejaVu Sans",sans-serif}}
svg text.t{{fill:var(--soft);font-size:11px}} svg text.h{{font-weight:600}}
svg text.on{{fill:var(--on)}} svg text.cross{{font-weight:700;font-size:14px}} .frame{{fill:none;stroke:var(--line)}}
.legend{{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;color:var(--soft)}}
.legend span{{display:inline-flex;align-items:center;gap:6px}}
svg.swatch{{width:13px;height:13px;flex:none}}
.gate{{fill:var(--gate)}} .up{{fill:var(--up)}} .pad{{fill:var(--pad)}} .row{{fill:var(--row)}} .lost{{fill:var(--lost)}}
{"".join(f".l{i}{{fill:var(--l{i})}}" for i in range(7))}{"".join(f".r{i}{{fill:var(--r{i})}}" for i in range(8))}
footer{{margin-top:36px;border-top:1px solid var(--line);padding-top:10px;font-size:13px;color:var(--soft)}}
"""
