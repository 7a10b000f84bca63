// Sets the formulas, which stand in the page as \(...\) and \[...\].
document.addEventListener("DOMContentLoaded", () => {
  for (const each of document.querySelectorAll(".arithmatex")) {
    const displayMode = each.tagName === "DIV";
    katex.render(each.textContent.trim().slice(2, -2), each, { displayMode });
  }
});
