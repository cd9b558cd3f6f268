"use strict";
// Tables: a click on a head sorts by the raw values; a second one turns the order round.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th");
    const table = head.closest("table");
    const at = head.cellIndex;
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of table.querySelectorAll("th")) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = (row) => row.cells[at].dataset.value;
    const compare = (a, b) => {
      const x = value(a), y = value(b);
      if (x === "" || y === "") return (x === "") - (y === ""); // what is not there stays at the end
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return up ? order : -order;
    };
    const rows = [...table.tBodies[0].rows].sort(compare);
    table.tBodies[0].append(...rows);
  });
}
// Plots: marks say their value under the pointer, and when they are tapped.
const said = document.getElementById("said");
for (const mark of document.querySelectorAll(".mark")) {
  const title = mark.querySelector("title");
  mark.dataset.said = title.textContent;
  title.remove();
}
const say = (event) => {
  const mark = event.target.closest ? event.target.closest(".mark") : null;
  said.hidden = mark === null;
  if (mark === null) return;
  said.textContent = mark.dataset.said;
  const box = said.getBoundingClientRect();
  said.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 4))}px`;
  said.style.top = `${Math.max(4, event.clientY - box.height - 10)}px`;
};
document.addEventListener("pointermove", say);
document.addEventListener("pointerdown", say);
