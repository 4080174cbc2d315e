// On a phone the members of a class or a module are folded: a tap on a heading shows what is below it.
// A link to a member, or searching the page for a word in it, unfolds it.
if (matchMedia("(max-width: 44.9375em)").matches) {
  const unfold = (member, open) => {
    member.firstElementChild.setAttribute("aria-expanded", open)
    open ? member.lastElementChild.removeAttribute("hidden") : member.lastElementChild.setAttribute("hidden", "until-found")
  }

  for (const member of document.querySelectorAll(".doc-children > .doc-object")) {
    const [heading, ...rest] = member.children
    const body = document.createElement("div")
    body.append(...rest)
    body.addEventListener("beforematch", () => unfold(member, true))
    member.append(body)
    heading.tabIndex = 0
    heading.role = "button"
    heading.addEventListener("click", () => unfold(member, body.hasAttribute("hidden")))
    heading.addEventListener("keydown", (key) => key.key === "Enter" && heading.click())
    unfold(member, false)
  }

  const follow = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)))
    for (let at = target?.closest(".doc-children > .doc-object"); at; at = at.parentElement.closest(".doc-children > .doc-object"))
      unfold(at, true)
    target?.scrollIntoView()
  }
  addEventListener("hashchange", follow)
  if (location.hash) follow()
}
