// The copy button of a console block takes its commands, without prompts and without what they print.
for (const code of document.querySelectorAll(".highlight code:has(.gp)")) {
  const copy = code.cloneNode(true)
  copy.querySelectorAll(".gp, .go").forEach((part) => part.remove())
  const lines = copy.textContent.split("\n").filter((line) => line.trim())
  code.closest(".highlight").setAttribute("data-copy", lines.join("\n"))
}
