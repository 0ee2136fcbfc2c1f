/* embed.S - the device code as data, each image with its size in bytes: 0 for one that was not built. */
#define IMAGE(name, file) \
    .globl name; .hidden name; .globl name##_size; .hidden name##_size; .balign 64; name: file; 1: .balign 8; name##_size: .quad 1b - name

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
