/* locale.h - characters of more than one byte on a terminal. */
#ifndef AFF_UI_LOCALE_H
#define AFF_UI_LOCALE_H
/* Takes the environment's character set; where that is not UTF-8, C.UTF-8: what the model writes is UTF-8. */
void aff__use_utf8(void);
#endif
