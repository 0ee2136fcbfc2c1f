/* embed.S - the device code as data. An image that was not built has no bytes. */
#define IMAGE(name, file) \
    .globl name; .hidden name; .globl name##_end; .hidden name##_end; .balign 64; name: file; name##_end: .byte 0

    .section .rodata
#ifdef AFF_CUDA_IMAGE
    IMAGE(aff__cuda_image, .incbin AFF_CUDA_IMAGE)
#else
    IMAGE(aff__cuda_image, )
#endif
#ifdef AFF_GFX1200_IMAGE
    IMAGE(aff__gfx1200_image, .incbin AFF_GFX1200_IMAGE)
#else
    IMAGE(aff__gfx1200_image, )
#endif
#ifdef AFF_GFX1201_IMAGE
    IMAGE(aff__gfx1201_image, .incbin AFF_GFX1201_IMAGE)
#else
    IMAGE(aff__gfx1201_image, )
#endif
    .section .note.GNU-stack, "", %progbits
