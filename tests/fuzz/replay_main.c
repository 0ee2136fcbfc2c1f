/* replay_main.c - runs a fuzz target over files and folders given as arguments, for builds without libFuzzer. */
#define _DEFAULT_SOURCE
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static long replayed;

static void replay(const char *path)
{
    struct stat st;
    if (stat(path, &st) != 0) {
        perror(path);
        exit(1);
    }
    if (S_ISDIR(st.st_mode)) {
        DIR *d = opendir(path);
        for (struct dirent *e; d && (e = readdir(d));) {
            char sub[4096];
            if (e->d_name[0] == '.') continue;
            snprintf(sub, sizeof sub, "%s/%s", path, e->d_name);
            replay(sub);
        }
        if (d) closedir(d);
        return;
    }
    FILE *f = fopen(path, "rb");
    uint8_t *buf = malloc((size_t)st.st_size + 1);
    if (!f || !buf || fread(buf, 1, (size_t)st.st_size, f) != (size_t)st.st_size) {
        perror(path);
        exit(1);
    }
    fclose(f);
    uint8_t *exact = malloc((size_t)st.st_size ? (size_t)st.st_size : 1); /* no slack: over-reads show under ASan */
    if (!exact) exit(1);
    memcpy(exact, buf, (size_t)st.st_size);
    LLVMFuzzerTestOneInput(exact, (size_t)st.st_size);
    free(exact);
    free(buf);
    replayed++;
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) replay(argv[i]);
    printf("%ld inputs replayed\n", replayed);
    return replayed ? 0 : 1;
}
