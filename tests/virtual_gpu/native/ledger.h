/* Which process holds how many bytes of which card: one file, mapped by every process of a virtual machine.
   The NVML library is C and the extension C++: both read this. Processes that have ended hold nothing. */
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_HOLDINGS 512

typedef struct {
  int32_t pid; /* 0: free */
  int32_t card;
  int64_t bytes;
} Holding;

typedef struct {
  Holding holdings[MAX_HOLDINGS];
} Ledger;

static inline int is_alive(int32_t pid) {
  return pid > 0 && (kill(pid, 0) == 0 || errno != ESRCH);
}

/* The ledger in the file at `path`, which is made where there is none; NULL where that fails. */
static inline Ledger* open_ledger(const char* path) {
  int file = path ? open(path, O_RDWR | O_CREAT, 0666) : -1;
  if (file < 0) return NULL;
  void* mapped = MAP_FAILED;
  if (ftruncate(file, sizeof(Ledger)) == 0) {
    mapped = mmap(NULL, sizeof(Ledger), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  close(file);
  return mapped == MAP_FAILED ? NULL : (Ledger*)mapped;
}
