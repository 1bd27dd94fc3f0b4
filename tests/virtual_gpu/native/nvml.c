/* libnvidia-ml.so.1 of the virtual machine: as many cards as the environment says (whose defaults
   the loader sets), used as the ledger says. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ledger.h"

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

typedef void* Device; /* the card's number plus one, since a handle is not NULL */

typedef struct {
  unsigned long long total, free, used;
} Memory;

typedef struct {
  unsigned pid;
  unsigned long long used_bytes;
  unsigned gpu_instance, compute_instance;
} Process;

typedef struct {
  unsigned gpu, memory;
} Utilization;

static int num_cards(void) {
  return atoi(getenv("VIRTUAL_GPU_NUM"));
}

static int number_of(Device device) {
  return (int)(intptr_t)device - 1;
}

static Device device_of(int number) {
  return (Device)(intptr_t)(number + 1);
}

static Ledger* ledger(void) {
  static Ledger* opened;
  if (!opened) opened = open_ledger(getenv("VIRTUAL_GPU_LEDGER"));
  return opened;
}

static void write_uuid(int number, char* out) {
  sprintf(out, "GPU-%08x-1111-2222-3333-444444444444", 0xa0 + number);
}

int nvmlInit(void) {
  return SUCCESS;
}

int nvmlInit_v2(void) {
  return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  return SUCCESS;
}

int nvmlShutdown(void) {
  return SUCCESS;
}

const char* nvmlErrorString(int result) {
  return result == NOT_FOUND ? "Not Found" : "Unknown Error";
}

int nvmlSystemGetDriverVersion(char* out, unsigned length) {
  snprintf(out, length, "580.00");
  return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = num_cards();
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* device) {
  if ((int)index >= num_cards()) return INVALID_ARGUMENT;
  *device = device_of(index);
  return SUCCESS;
}

/* A MIG instance is a part of card 0, and is known by any UUID that says MIG. */
int nvmlDeviceGetHandleByUUID(const char* asked, Device* device) {
  if (strncmp(asked, "MIG-", 4) == 0) {
    *device = device_of(0);
    return SUCCESS;
  }
  for (int number = 0; number < num_cards(); number++) {
    char uuid[64];
    write_uuid(number, uuid);
    if (strcmp(uuid, asked) == 0) {
      *device = device_of(number);
      return SUCCESS;
    }
  }
  return NOT_FOUND;
}

int nvmlDeviceGetUUID(Device device, char* out, unsigned length) {
  (void)length;
  write_uuid(number_of(device), out);
  return SUCCESS;
}

int nvmlDeviceGetName(Device device, char* out, unsigned length) {
  (void)device;
  snprintf(out, length, "%s", getenv("VIRTUAL_GPU_NAME"));
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Device device, Memory* memory) {
  memory->total = strtoull(getenv("VIRTUAL_GPU_MIB"), NULL, 10) << 20;
  memory->used = 0;
  for (int i = 0; ledger() && i < MAX_HOLDINGS; i++) {
    const Holding* holding = &ledger()->holdings[i];
    if (holding->card == number_of(device) && is_alive(holding->pid)) memory->used += holding->bytes;
  }
  memory->free = memory->total - memory->used;
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned* count, Process* processes) {
  unsigned num_found = 0;
  unsigned room = *count;
  for (int i = 0; ledger() && i < MAX_HOLDINGS; i++) {
    const Holding* holding = &ledger()->holdings[i];
    if (holding->card != number_of(device) || !is_alive(holding->pid)) continue;
    if (processes && num_found < room) {
      processes[num_found] = (Process){holding->pid, holding->bytes, 0xFFFFFFFF, 0xFFFFFFFF};
    }
    num_found++;
  }
  *count = num_found;
  return num_found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device device, Utilization* rates) {
  (void)device;
  *rates = (Utilization){0, 0};
  return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long* reasons) {
  (void)device;
  *reasons = strtoull(getenv("VIRTUAL_GPU_THROTTLE"), NULL, 16);
  return SUCCESS;
}

int nvmlDeviceGetTemperature(Device device, int sensor, unsigned* degrees) {
  (void)sensor;
  *degrees = 60 + number_of(device);
  return SUCCESS;
}

int nvmlDeviceGetClockInfo(Device device, int clock, unsigned* mhz) {
  (void)device;
  (void)clock;
  *mhz = 1410;
  return SUCCESS;
}

int nvmlDeviceGetPowerUsage(Device device, unsigned* milliwatts) {
  (void)device;
  *milliwatts = 300000;
  return SUCCESS;
}

/* 300 W, always. */
int nvmlDeviceGetTotalEnergyConsumption(Device device, unsigned long long* millijoules) {
  (void)device;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  *millijoules = (unsigned long long)(300.0 * (now.tv_sec * 1e3 + now.tv_nsec / 1e6));
  return SUCCESS;
}
