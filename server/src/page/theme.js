// Before the page is drawn: the theme that was chosen.
"use strict";
try {
  document.documentElement.dataset.theme = localStorage.getItem("qhx.theme") ?? "";
} catch { /* Without storage the page has the system's theme. */ }
