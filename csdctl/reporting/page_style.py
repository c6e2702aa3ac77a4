"""The style sheet of the HTML report: light, dark and print."""

STYLE = """
:root{color-scheme:light dark;
--paper:#fff;--ink:#1d2733;--soft:#5a6775;--grid:#d5dbe1;--panel:#f6f8fa;
--series-0:#0b63b5;--series-1:#c2570c;
--series-2:#d9a400;--series-3:#7a3ea1;
--series-4:#8a96a3;
--series-5:#0f8a6a;
--series-6:#c0246a;--series-7:#5c4b37}
@media (prefers-color-scheme:dark){:root{
--paper:#12171d;--ink:#e6ebf0;--soft:#a3afbb;--grid:#3a4551;--panel:#1a2129;
--series-0:#5aa9f0;--series-1:#f08a4b;
--series-2:#f2cc5c;--series-3:#b98be0;
--series-4:#7d8894;
--series-5:#45c9a2;
--series-6:#f06fa8;--series-7:#c2a98a}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.2rem;max-width:82rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,"Segoe UI",Roboto,"Liberation Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;margin:0 0 .3rem}
h2{font-size:1.2rem;margin:2rem 0 .6rem;border-bottom:1px solid var(--grid)}
h3{font-size:1rem;margin:0}header p,figcaption p{margin:.1rem 0 .5rem;color:var(--soft)}
figcaption p{font-size:.87rem}
.parts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:1rem;align-items:start}
.parts>.scroll,.parts>p{grid-column:1/-1}
figure{margin:0;padding:.9rem;background:var(--panel);border-radius:6px;min-width:0}
svg{display:block;width:100%;height:auto;max-width:46rem;font-family:inherit}
.scroll{overflow:auto;max-width:100%}details .scroll{max-height:28rem}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--grid);
overflow-wrap:normal}
td{max-width:32rem;overflow-wrap:break-word}thead th{color:var(--soft);font-weight:600}
tbody th{font-weight:500}
summary{cursor:pointer;font-size:.87rem;color:var(--soft)}
:focus-visible{outline:2px solid var(--series-0);outline-offset:2px}
.skip{position:absolute;left:-99rem}.skip:focus{position:static}
@media print{body{max-width:none;padding:0;font-size:10pt}figure,tr{break-inside:avoid}
.scroll{max-height:none;overflow:visible}.skip{display:none}
:root{--paper:#fff;--ink:#000;--soft:#333;--grid:#bbb;--panel:#fff}}
"""
