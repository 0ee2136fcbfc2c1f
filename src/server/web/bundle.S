/* The files of the web page as bytes: aff_web_NAME .. aff_web_NAME_end. The folder is in the assembler's search path. */
.macro file name, path
    .global \name
    .hidden \name
    .global \name\()_end
    .hidden \name\()_end
\name:
    .incbin "\path"
\name\()_end:
    .byte 0
.endm
    .section .rodata
    file aff_web_html, "index.html"
    file aff_web_css, "style.css"
    file aff_web_app, "app.js"
    file aff_web_markdown, "markdown.js"
    file aff_web_machine, "machine.js"
    file aff_web_icon, "icon.svg"
#if defined(__linux__) && defined(__ELF__)
    .section .note.GNU-stack, "", %progbits
#endif
