(function () {
  "use strict";
  // Whatever shows one operation is marked together with what the pointer is over.
  function mark(event, on) {
    var shape = event.target.closest && event.target.closest("[data-op]");
    if (!shape) return;
    document.querySelectorAll('[data-op="' + shape.dataset.op + '"]').forEach(function (same) {
      same.classList.toggle("same", on);
    });
  }
  document.addEventListener("pointerover", function (event) { mark(event, true); });
  document.addEventListener("pointerout", function (event) { mark(event, false); });

  // A link to a row that is folded away unfolds it.
  function unfold() {
    var target = location.hash && document.getElementById(location.hash.slice(1));
    for (var at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    if (target) target.scrollIntoView({ block: "center" });
  }
  window.addEventListener("hashchange", unfold);
  unfold();

  // A click on a title sorts by the column: figures with units by size, others as text.
  var units = { ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1, B: 1, KiB: 1024, MiB: 1048576, GiB: 1073741824, TiB: 1099511627776,
    k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15, "%": 1 };
  function value(cell) {
    var content = cell ? cell.textContent.trim().replace(/,/g, "") : "";
    var match = /^([\d.e+-]+)\s*([A-Za-z%]*)$/.exec(content);
    return match && !isNaN(match[1]) ? match[1] * (units[match[2]] || 1) : content;
  }
  document.querySelectorAll("table.sortable th").forEach(function (title) {
    title.addEventListener("click", function () {
      var column = Array.prototype.indexOf.call(title.parentElement.children, title);
      var body = title.closest("table").tBodies[0];
      var down = title.dataset.order !== "down";
      title.dataset.order = down ? "down" : "up";
      Array.from(body.rows).sort(function (a, b) {
        var x = value(a.cells[column]), y = value(b.cells[column]);
        var order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
        return down ? -order : order;
      }).forEach(function (row) { body.appendChild(row); });
    });
  });
})();
